#!/usr/bin/env bash
# Builds sdist and wheel, installs the wheel into an empty environment, and runs the console script from an unrelated folder.
# BIN is the bin folder of an environment that has `build`.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

mkdir "$work/source" "$work/elsewhere"
git ls-files -z --cached --others --exclude-standard | tar --null --files-from=- -c | tar -x -C "$work/source"
"$BIN/python" -m build --outdir "$work/dist" "$work/source" > "$work/build.log" || { cat "$work/build.log"; exit 1; }
"$BIN/python" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --constraint constraints.txt "$work"/dist/*.whl

cd "$work/elsewhere"
where=$("$work/venv/bin/python" -c 'import bo_tuner.storage as storage; print(storage.__file__)')
case "$where" in
    "$work/venv/"*) ;;
    *) echo "bo_tuner.storage comes from $where, not from the wheel" >&2; exit 1 ;;
esac
"$work/venv/bin/bo-tuner" tune bert-tiny --device cpu --ranks 2 --seq-len 16 --max-global-batch 4 --budget "1 trials" --out exported
"$work/venv/bin/bo-tuner" show bert-tiny_seq16_fp32_2cpu --json > shown.json
test -s shown.json
exported/launch.sh --steps 3 | tail -1
echo "wheel check passed"

#!/usr/bin/env bash
# Trains with the tuned config, as it was measured. Arguments go to train.py:
#   ./launch.sh --steps 20                          synthetic data
#   ./launch.sh --data data.py:dataset --save out   your data; ./launch.sh --help tells more
# PYTHON chooses the interpreter; by default it is the one that measured, or python3 where that is not.
set -euo pipefail
PYTHON=${PYTHON:-@PYTHON@}
[ -x "$(command -v "$PYTHON")" ] || PYTHON=python3
job=$(cd "$(dirname "$0")" && pwd)
export PATH="$(dirname "$(command -v "$PYTHON")"):$PATH"   # for the ninja beside it, which torch compiles with: another starts over
"$PYTHON" "$job/train.py" --check "$@"   # wrong arguments end here, in one line
case " $* " in *" --help "* | *" -h "*) exit ;; esac
exec env @COMMAND@ "$@"

#!/usr/bin/env bash
# The checks that need a GPU, in under four minutes on one (those of several skip there): run it in an environment where bo_tuner and its dev extra are installed.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python3}" -m pytest -m gpu tests/gpu -v --durations=0 "$@"

#!/usr/bin/env bash
# Trains with the tuned config, as it was measured. Arguments go to train.py:
#   ./launch.sh --steps 20                       synthetic data
#   ./launch.sh --data data.py:dataset --save out   your data, see train.py --help
set -euo pipefail
cd "$(dirname "$0")"
exec env @COMMAND@ "$@"

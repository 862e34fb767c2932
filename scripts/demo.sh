#!/usr/bin/env bash
# Trains a small GPT through our layers and through stock Megatron's, with the same seed and data, and
# compares the losses. Arguments go to `flux-megatron train`, for example `--tp 4`.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/environment.sh
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # ranks are processes: threads would fight over the cores
exec .venv/bin/flux-megatron train --config configs/train/demo.yaml --compare "$@"

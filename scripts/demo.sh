#!/usr/bin/env bash
# Trains a small GPT through our layers and through stock Megatron's, with the same seed and data, and
# compares the losses; the last line says where the curves are. Arguments go to `flux-megatron train`,
# for example `--tp 4`.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/environment.sh
exec .venv/bin/flux-megatron train --config configs/train/demo.yaml --compare \
    --out "out/demo-$(date +%Y%m%d-%H%M%S)" "$@"

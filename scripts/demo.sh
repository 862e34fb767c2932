#!/usr/bin/env bash
# Trains a small GPT through our layers and through stock Megatron's, with the same seed and data, and
# compares the losses; then decodes with both from what ours has learnt, and compares the tokens.
# Arguments go to `flux-megatron train`, for example `--tp 4`.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/environment.sh
out=out/demo-$(date +%Y%m%d-%H%M%S)
before=
for word; do # the last --out counts
    case $word in --out=*) out=${word#*=} ;; esac
    [ "$before" != --out ] || out=$word
    before=$word
done
.venv/bin/flux-megatron train --config configs/train/demo.yaml --compare --out "$out" "$@"
exec .venv/bin/flux-megatron generate --checkpoint "$out/flux" --prompt "def " --tokens 48 --compare

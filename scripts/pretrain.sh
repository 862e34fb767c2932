#!/usr/bin/env bash
# Trains with Megatron-LM's own, unedited pretrain_gpt.py, with stock layers and with --flux-overlap, and compares the
# losses of every iteration; fails where one differs by more than BOUND (docs/tests.md) or no call overlapped.
#
#   FLUX_MEGATRON_LM=path/to/Megatron-LM scripts/pretrain.sh [more of Megatron's arguments, for both runs]
#
# DEVICE=cpu (the default; a tiny model, gloo) or cuda, MODELS="gpt llama" (also: mtp, moe), RANKS="2 4" (each is the
# tensor-parallel size), BOUND=1e-5, LIMIT=600 (seconds a run), PYTHON, by default that of .venv,
# STOCK="arguments of the stock run" and FLUX="--flux-overlap and knobs". Besides flux_megatron it needs what pretrain_gpt.py needs:
#   pip install einops pybind11 pyyaml regex requests sentencepiece six tiktoken, and make with a C++ compiler.
# In the checkout it leaves Megatron-LM's compiled data set helper, nothing else. On two cores some four minutes.
set -euo pipefail
: "${FLUX_MEGATRON_LM:?set it to a checkout of Megatron-LM}"
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# an absolute path: below, another python3 stands on PATH, and runs start in another folder
python=$(realpath -s -- "$(command -v "${PYTHON:-$here/.venv/bin/python}")")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# the data set helper is built with the python3 and python3-config of the PATH; virtual environments lack the latter
mkdir "$work/bin"
suffix=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
printf '#!/bin/sh\nexec "%s" "$@"\n' "$python" >"$work/bin/python3"
printf '#!/bin/sh\necho "%s"\n' "$suffix" >"$work/bin/python3-config"
chmod +x "$work/bin/python3" "$work/bin/python3-config"
export PATH="$work/bin:$PATH" PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1 GLOO_SOCKET_IFNAME=lo PYTHONDONTWRITEBYTECODE=1

device=${DEVICE:-cpu}
if [ "$device" = cpu ]; then
    SIZES=(--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --max-position-embeddings 32
        --lr 1e-3 --min-lr 1e-3 --use-cpu-initialization)
    stock=${STOCK:---no-gradient-accumulation-fusion} # else with our kernel, for want of apex's
else
    SIZES=(--num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024
        --lr 1e-4 --min-lr 1e-4)
    stock=${STOCK:---flux-overlap --flux-compare 1000000} # stock linears, which need our norm beside them
fi
MODEL=("${SIZES[@]}" --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0)
TRAINING=(--micro-batch-size 2 --global-batch-size 4 --train-iters 6 --lr-decay-style constant
    --log-interval 1 --eval-iters 0 --eval-interval 1000)
DATA=(--mock-data --tokenizer-type NullTokenizer --vocab-size 4223 --split 99,1,0 --num-workers 0
    --data-cache-path "$work/cache" --no-create-attention-mask-in-dataloader)
NO_TE_NO_APEX=(--transformer-impl local --no-masked-softmax-fusion --no-rope-fusion)
gpt=()
llama=(--swiglu --normalization RMSNorm --untie-embeddings-and-output-weights --disable-bias-linear
    --group-query-attention --num-query-groups 4)
mtp=(--mtp-num-layers 1)
moe=(--num-experts 4 --moe-router-topk 2 --disable-bias-linear)

train() { # LOG RANKS ARGUMENTS...
    local log=$1 ranks=$2
    shift 2
    (cd "$FLUX_MEGATRON_LM" && timeout "${LIMIT:-600}" "$python" -m flux_megatron.cli run --device "$device" --nproc-per-node "$ranks" \
        pretrain_gpt.py "${MODEL[@]}" "${TRAINING[@]}" "${DATA[@]}" "${NO_TE_NO_APEX[@]}" "$@") >"$log" 2>&1 ||
        { grep -v "^E[0-9]" "$log" | tail -n 60; exit 1; }
    sed -nE 's/.* iteration +([0-9]+)\/.* lm loss: ([^ ]+) .*/\1 \2/p' "$log" >"$log.losses"
}

for model in ${MODELS:-}; do
    [[ " gpt llama mtp moe " == *" $model "* ]] || { echo "MODELS has $model, gpt, llama, mtp or moe expected" >&2; exit 2; }
done
status=0
for model in ${MODELS:-gpt llama}; do
    for ranks in ${RANKS:-2 4}; do
        echo "== $model on $ranks ranks: iteration, stock, ours, difference"
        declare -n options=$model
        parallel=(--tensor-model-parallel-size "$ranks" --sequence-parallel)
        # shellcheck disable=SC2086
        train "$work/stock" "$ranks" "${parallel[@]}" "${options[@]}" "$@" $stock
        # shellcheck disable=SC2086
        train "$work/ours" "$ranks" "${parallel[@]}" "${options[@]}" "$@" ${FLUX:---flux-overlap}
        join <(sort "$work/stock.losses") <(sort "$work/ours.losses") | sort -n | awk -v bound="${BOUND:-1e-5}" -v iterations="$(wc -l <"$work/stock.losses")" '
            { d = $2 - $3; d = d < 0 ? -d : d; printf "%3d %.6f %.6f %.1e\n", $1, $2, $3, d; if (!(d <= bound) || ($2 $3) ~ /[^-+.0-9eE]/) bad = 1 } # some take nan for 0
            END { exit bad || NR < 2 || NR != iterations }' || { echo "DIFFERENT"; status=1; }
        sed -n '/^flux_megatron: .* overlapped/,/^[^ f]/p' "$work/ours" | grep -E '^flux_megatron|^  ' || true
        sed -n '/^ flux: /p' "$work/ours" | tail -n 2
        grep -qE '^flux_megatron: [1-9][0-9]* of [0-9]+ calls overlapped' "$work/ours" || { echo "NOTHING OVERLAPPED"; status=1; }
    done
done
exit $status

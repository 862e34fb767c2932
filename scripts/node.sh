#!/usr/bin/env bash
# Measures and checks on one node of four or eight GPUs what two cannot show; docs/support.md has what is still open.
#
#   scripts/node.sh RUN OUT       appends rows to files in the folder OUT; all GPUs of the node take part
#
# RUN is one of
#   shared      training iterations, TP 2 beside data parallelism and in a pipeline, and 1,000 of them in a row
#   iterations  training iterations, all GPUs tensor parallel: stock, --tp-comm-overlap and ours
#   launches    losses of Megatron launches with TransformerEngine beside stock's, with context parallelism
#   megatron    Megatron-LM's own unit tests, with its layers and with ours
#   operators   every operation with both settings of CUDA_DEVICE_MAX_CONNECTIONS; beside an all-reduce
#   operations  decoding, embeddings and experts, beside their unfused baselines
#   checks      doctor, 100,000 random calls, training beside stock layers, the whole suite
#
# FLUX_MEGATRON_LM=path/to/Megatron-LM for shared, iterations, launches and megatron; SECONDS_EACH (600) ends a measurement;
# GPUS, by default all of the node; PYTHON, by default that of .venv; PRINT=1 prints the commands alone.
set -uo pipefail
run=${1:?RUN is missing: shared, iterations, launches, megatron, operators, operations or checks}
out=$(realpath -m "${2:?OUT is missing: a folder for rows}") checkout=$(realpath -m "${FLUX_MEGATRON_LM:-}")
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python} limit=${SECONDS_EACH:-600}
gpus=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}
commit=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
mkdir -p "$out"
# no library may use NVLink multicast unless the caller says so
export TORCH_SYMM_MEM_DISABLE_MULTICAST=${TORCH_SYMM_MEM_DISABLE_MULTICAST-1} NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE-0}
export NVSHMEM_DISABLE_NVLS=${NVSHMEM_DISABLE_NVLS-1} UB_SKIPMC=${UB_SKIPMC-1}
status=0

step() {
    echo "== $*"
    [ -n "${PRINT:-}" ] || "$@" || status=1
}

iterations() {
    : "${FLUX_MEGATRON_LM:?set it to a checkout of Megatron-LM}"
    step "$python" -m flux_megatron.lab.measure.iterations "$checkout" "$out/iterations.jsonl" --commit "$commit" \
        --seconds "$limit" "$@"
}

ranks() {
    step "$python" -m torch.distributed.run --standalone --nproc-per-node "$gpus" "$@"
}

case $run in
shared)
    for layout in dp pp; do
        iterations --tp 2 --layout $layout --M 2048,8192
        iterations --tp 2 --layout $layout --M 2048,8192 --micro-batches 8
    done
    iterations --tp 2 --layout dp --M 2048 --arms flux --timed 990 --limit-s "$limit"
    ;;
iterations)
    iterations --tp "$gpus" --M 2048,4096,8192
    ;;
launches)
    : "${FLUX_MEGATRON_LM:?set it to a checkout of Megatron-LM}"
    step "$python" tests/differential/te_launches.py "$checkout" "$out/te_launches.jsonl" --commit "$commit" --seconds "$limit"
    step "$python" tests/differential/te_launches.py "$checkout" "$out/te_launches.jsonl" --commit "$commit" --seconds "$limit" --fp8
    ;;
megatron)
    : "${FLUX_MEGATRON_LM:?set it to a checkout of Megatron-LM}"
    step "$python" tests/integration/mcore_suite.py --gpus --ranks "$gpus" --megatron "$checkout" --out "$out/mcore_suite.jsonl"
    ;;
operators)
    for connections in unset 1; do
        connected=(env -u CUDA_DEVICE_MAX_CONNECTIONS)
        [ $connections = unset ] || connected=(env CUDA_DEVICE_MAX_CONNECTIONS=1)
        step "${connected[@]}" "$python" -m flux_megatron bench --tp "$gpus" --out "$out" \
            --time-limit "$limit" --commit "$commit"
        step "${connected[@]}" "$python" -m flux_megatron bench --tp "$gpus" --suite llama2-70b --M 4,16,64,128,256 \
            --out "$out" --time-limit "$limit" --commit "$commit"
    done
    step "$python" -m flux_megatron bench --tp "$gpus" --with-nccl-load --out "$out" --time-limit "$limit" --commit "$commit"
    ;;
operations)
    step "$python" -m flux_megatron bench operations --tp "$gpus" --out "$out" --time-limit "$limit" \
        --commit "$commit"
    ;;
checks)
    step "$python" -m flux_megatron doctor --gpus "$gpus"
    ranks tests/gpu/soak.py --calls 100000 --seconds "$limit" > >(tee -a "$out/soak.txt")
    sed 's/^strategy:.*/strategy: hopper/' configs/train/h200.yaml >"$out/hopper.yaml"
    step "$python" -m flux_megatron train --config "$out/hopper.yaml" --tp "$gpus" --compare --out "$out/train"
    step env TEST_PYTHON="${PYTHON:-}" scripts/test.sh
    ;;
*)
    echo "RUN $run given; shared, iterations, launches, megatron, operators, operations or checks expected" >&2
    exit 2
    ;;
esac
exit $status

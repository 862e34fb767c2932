#!/usr/bin/env bash
# Submits the paper's training runs, GPT-3 175B and Llama-2 70B on 16 nodes of 8 GPUs, each with its three arms, one
# after the other: they are to be compared, and would share the network. Runs are in runs/paper/.
#
#   FLUX_MEGATRON_LM=path/to/Megatron-LM scripts/slurm/paper.sh CLUSTER [options of `flux-megatron launch`]
#
# CLUSTER: a100-pcie, a100-nvlink or h800-nvlink, for two experiments; all: six. Results, when they are through:
#   flux-megatron results runs/paper/*
set -euo pipefail
cluster=${1:-}
case $cluster in
all) clusters=(a100-pcie a100-nvlink h800-nvlink) ;;
a100-pcie | a100-nvlink | h800-nvlink) clusters=("$cluster") ;;
*) sed -n '2,8p' "$0" >&2; exit 2 ;;
esac
shift
after=()
for cluster in "${clusters[@]}"; do
    for model in gpt3-175b llama2-70b; do
        name=paper/${model}_$cluster
        job=$("${PYTHON:-python3}" -m flux_megatron.cli launch "$name" --submit "${after[@]}" "$@")
        echo "$name: job $job"
        after=(--sbatch "dependency=afterany:$job")
    done
done

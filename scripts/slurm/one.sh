#!/usr/bin/env bash
# Submits one experiment of configs/experiments, all its arms; prints the id of the job.
#
#   scripts/slurm/one.sh EXPERIMENT [options of `flux-megatron launch`]
#   FLUX_MEGATRON_LM=path/to/Megatron-LM scripts/slurm/one.sh paper/gpt3-175b_h800-nvlink --site my-cluster.yaml
#
# PYTHON: one that has flux_megatron; on a login node it needs neither torch nor a GPU. The nodes' own Python, modules,
# partition and account belong into the site's file: copy scripts/slurm/site.yaml. docs/cluster.md has the rest.
set -euo pipefail
[ $# -gt 0 ] || { sed -n '2,7p' "$0" >&2; exit 2; }
exec "${PYTHON:-python3}" -m flux_megatron.cli launch --submit "$@"

"""Programs that stand in for what this machine has not: ranks, GPUs.

They lie in a folder that comes first on the PATH of a job. What they were asked is in $WORK, and so
are the faults that a test orders: files of that name.
"""

from __future__ import annotations

import sys
from pathlib import Path

from started import executable

# Ranks of a node: the first node's write rows, a log and a checkpoint, as `flux-megatron train`
# does. A fault is an order for one arm: to crash or to hang at step 3, so many times. On an unfit
# node the doctor fails.
PYTHON = f"""
case "$*" in
"-m flux_megatron.doctor "*) [ ! -e "$WORK/ecc-$SLURMD_NODENAME" ]; exit ;;
"-m flux_megatron.preflight "*) exec {sys.executable} "$@" ;;
esac
for word; do
    case $word in --log-dir=*) logs=${{word#*=}}/0 ;; --node-rank=*) node=${{word#*=}} ;; esac
    [ "${{before-}}" != --out ] || out=$word
    before=$word
done
part=${{out%/train}} first=1
[ "$node" = 0 ] || {{ sleep 0.2; exit 0; }}
echo "${{part#"$RUN/"}} ${{SLURM_JOB_NODELIST-}}" >>"$WORK/trained"
mkdir -p "$logs" "$out/checkpoints"
if [ "$word" = --resume ]; then first=$(($(cat "$out/checkpoints/latest" || echo 0) + 1)); fi
fault() {{ # NAME: whether it is ordered, once less the next time
    local left=$(cat "$WORK/$1-${{part##*/}}" 2>/dev/null || echo 0)
    [ "$left" -gt 0 ] && echo $((left - 1)) >"$WORK/$1-${{part##*/}}"
}}
for step in $(seq "$first" "$STEPS"); do
    row="'step': $step, 'loss': 1.0, 'seconds': 0.0$((step % 3 + 1)), 'first_step': $first"
    echo "{{$row}}" | tr "'" '"' >>"$out/metrics.jsonl"
    echo "step $step" >>"$logs/stdout.log"
    [ "$step" != 3 ] || {{
        echo 2 >"$out/checkpoints/latest"
        ! fault crash || exit 7
        ! fault hang || {{ sleep 600 & touch "$WORK/hangs"; wait; exit 1; }}
    }}
done
echo "$STEPS" >"$out/checkpoints/latest"
"""

# Two sound GPUs, but for what the file $WORK/ecc-NODE says
NVIDIA_SMI = """
errors=$(cat "$WORK/ecc-$SLURMD_NODENAME" 2>/dev/null || echo 0)
case "$*" in
"--query-gpu=index --format"*) printf '0\\n1\\n' ;;
*ecc.errors*) printf '0, 0\\n1, %s\\n' "$errors" ;;
*remapped_rows*) printf '0, No\\n1, No\\n' ;;
*clocks_throttle*) printf '0, Not Active\\n1, Not Active\\n' ;;
"nvlink --status") printf 'GPU %s: X\\n Link 0: 26.562 GB/s\\n' 0 1 ;;
"nvlink --errorcounters") printf 'GPU %s: X\\n Link 0: Recovery Errors: 0\\n' 0 1 ;;
*) exit 2 ;;
esac
"""


def put(folder: Path) -> Path:
    """Write the programs into a folder of their own."""
    where = folder / "bin"
    for name, text in {"python": PYTHON, "nvidia-smi": NVIDIA_SMI}.items():
        executable(where / name, f"#!/usr/bin/env bash\nset -u\n{text}")
    return where

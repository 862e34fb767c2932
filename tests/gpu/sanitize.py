"""compute-sanitizer over our kernels: each of a few small kinds of calls once, on two GPUs.

    python tests/gpu/sanitize.py             memcheck and racecheck
    python tests/gpu/sanitize.py memcheck    one of them; also synccheck, initcheck

The calls are those with which the soak begins: forward and backward pieces, all strategies, the
Hopper kernels with both transports. Only our kernels are instrumented, not those of the libraries.
Launches must not be made blocking (`--force-blocking-launches`, CUDA_LAUNCH_BLOCKING): the Hopper
GEMM+RS waits for pushes that its peers enqueue behind its launch. Prints one JSON row a tool; the
exit code is 0 if all are clean.

racecheck makes no calls of the Hopper kernels: with them it ends in an internal error of its own
(CUDA 13.0), after it has reported the byte by which Triton hands a partition of `warp_specialize`
to its warps; that is written before, and read after, the same `bar.sync 1` (docs/validation.md).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

KERNELS = ("ag_gemm_kernel", "gemm_rs_kernel", "reduce_received_kernel", "wait_sources_kernel")
RANKS, KINDS = 2, 24
LIMIT_S = 300


def command(tool: str, sanitizer: str) -> list[str]:
    ours = [word for name in KERNELS for word in ("--kernel-name", f"kernel_substring={name}")]
    ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    calls = ["--calls", "0", "--kinds", str(KINDS), "--small", "--graphs", "0"]
    if tool == "racecheck":
        calls += ["--portable"]
    # libraries ask the driver for things that it may refuse: memcheck tells that too
    quiet = ["--report-api-errors", "no"] if tool == "memcheck" else []
    return [
        sanitizer, "--tool", tool, *quiet, "--target-processes", "all", "--error-exitcode", "9",
        *ours, sys.executable, *ranks, str(Path(__file__).with_name("soak.py")), *calls,
    ]  # fmt: skip


def sanitize(tool: str) -> dict:
    """Run the calls under `tool`; the row. `TimeoutExpired` after `LIMIT_S`."""
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    # instrumented kernels are slow, and so is a rank that compiles
    environment = os.environ | {"FLUX_MEGATRON_TIMEOUT_S": "60"}
    began = time.monotonic()
    run = subprocess.run(
        command(tool, sanitizer), env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    output = run.stdout + run.stderr
    faults = "\n".join(line for line in output.splitlines() if line.startswith("====="))
    summaries = re.findall(r"=+ ((?:ERROR|RACECHECK) SUMMARY: .*)", output)
    row = next((line for line in run.stdout.splitlines() if line.startswith('{"what"')), "{}")
    clean = run.returncode == 0 and bool(summaries)
    if not clean:
        print(faults[:20_000], output[-4000:], sep="\n", file=sys.stderr)
    return {
        "what": tool, "clean": clean, "seconds": round(time.monotonic() - began, 1),
        "summaries": sorted({*summaries}), "kernels": KERNELS, "calls": json.loads(row),
    }  # fmt: skip


if __name__ == "__main__":
    rows = [sanitize(tool) for tool in sys.argv[1:] or ["memcheck", "racecheck"]]
    print("\n".join(json.dumps(row) for row in rows))
    raise SystemExit(not all(row["clean"] for row in rows))

"""A short load on all GPUs of a node, started by torchrun: rank 0 prints what it reached, as JSON.

`allreduce_gbps` is the bus bandwidth of NCCL's all-reduce, 2 (R - 1) / R x bytes / time, or null on
one GPU; `sm_mhz` the GPUs' clocks under GEMMs, or null where they are unknown.
"""

from __future__ import annotations

import datetime
import json
import os
import time

import torch
import torch.distributed as dist

from flux_megatron.preflight.finding import NotChecked, output_of

SIZE_BYTES = 256 * 2**20
REPEATS = 20
WARM_S = 1.5  # GEMMs, in which clocks rise
BOUND_S = 120  # of every wait for another rank


def main() -> None:
    on_gpu = torch.cuda.is_available()
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", timeout=datetime.timedelta(seconds=BOUND_S)
    )
    clocks = _clocks_under_gemms(device) if on_gpu else None
    reached = {"allreduce_gbps": _bus_gbps(device), "sm_mhz": clocks}
    if rank == 0:
        print(json.dumps(reached), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _clocks_under_gemms(device: torch.device) -> list[int] | None:
    """The SM clock of every rank's GPU after WARM_S of GEMMs on all of them, in MHz."""
    x = torch.ones(8192, 8192, device=device, dtype=torch.bfloat16)
    until = time.monotonic() + WARM_S
    while time.monotonic() < until:
        for _ in range(20):
            x @ x
        torch.cuda.synchronize()
    for _ in range(200):  # the GPU is busy while its clock is read
        x @ x
    own = _sm_mhz(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    torch.cuda.synchronize()
    clocks: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(clocks, own)
    known = [mhz for mhz in clocks if mhz is not None]
    return known if len(known) == len(clocks) else None


def _sm_mhz(gpu: str) -> int | None:
    """By its UUID: nvidia-smi also numbers the GPUs that this job does not see."""
    query = ["--query-gpu=clocks.sm", "--format=csv,noheader,nounits", f"--id={gpu}"]
    try:
        return int(output_of(["nvidia-smi", *query], 30))
    except (NotChecked, ValueError):
        return None


def _bus_gbps(device: torch.device) -> float | None:
    ranks = dist.get_world_size()
    if ranks == 1:
        return None
    size_bytes = SIZE_BYTES if device.type == "cuda" else 2**20
    x = torch.zeros(size_bytes // 4, device=device)
    for _ in range(5):
        dist.all_reduce(x)
    _finish(device)
    started = time.perf_counter()
    for _ in range(REPEATS):
        dist.all_reduce(x)
    _finish(device)
    seconds = (time.perf_counter() - started) / REPEATS
    return 2 * (ranks - 1) / ranks * size_bytes / seconds * 1e-9


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()

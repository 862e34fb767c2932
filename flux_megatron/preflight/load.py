"""What a node reaches under load, against what its cluster's file expects at least."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from flux_megatron.preflight.finding import Finding, NotChecked, Status, output_of

LOAD_S = 180  # importing torch on a busy file system included


def examine(gpus: int, allreduce_gbps: float | None, sm_mhz: int | None) -> Iterator[Finding]:
    """All-reduce and clocks of one short load. Without an expectation there is nothing to hold."""
    for name, least in (("all-reduce", allreduce_gbps), ("SM clocks", sm_mhz)):
        if least is None:
            yield Finding("not checked", f"{name}: the cluster's file expects no figure")
    if allreduce_gbps is None and sm_mhz is None:
        return
    if find_spec("torch") is None:  # on no node, which the doctor says
        yield Finding("not checked", "all-reduce and SM clocks: no torch")
        return
    try:
        reached = _reached(gpus)
    except NotChecked as error:
        yield Finding("unfit", f"all-reduce over {gpus} GPUs: {error}")
        return
    if allreduce_gbps is not None:
        gbps = reached["allreduce_gbps"]
        if gbps is None:
            yield Finding("not checked", "all-reduce: a single GPU")
        else:
            status: Status = "ok" if gbps >= allreduce_gbps else "unfit"
            yield Finding(status, f"all-reduce {gbps:.0f} GB/s, {allreduce_gbps:g} expected")
    if sm_mhz is not None:
        yield from _clocks(reached["sm_mhz"], sm_mhz)


def _clocks(found: list[int] | None, least: int) -> Iterator[Finding]:
    if not found:
        yield Finding("not checked", "SM clocks: nvidia-smi does not report them")
        return
    slow = [f"GPU {i}: {mhz} MHz" for i, mhz in enumerate(found) if mhz < least]
    if slow:
        yield Finding("unfit", f"SM clock under GEMMs: {', '.join(slow)}, {least} expected")
    else:
        yield Finding("ok", f"SM clocks under GEMMs {min(found)} to {max(found)} MHz")


def _reached(gpus: int) -> dict[str, Any]:
    """What flux_megatron.preflight.allreduce prints. `NotChecked` where it fails or hangs."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={gpus}"]
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    output = output_of([*torchrun, *rendezvous, "-m", "flux_megatron.preflight.allreduce"], LOAD_S)
    # NCCL_DEBUG=INFO writes there too
    if found := [one for one in output.splitlines() if one.startswith('{"allreduce_gbps"')]:
        return json.loads(found[-1])
    raise NotChecked("it printed no figures")

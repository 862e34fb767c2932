"""The GPUs of this machine, how ranks reach each other's memory, and the variables that are set."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec

from flux_megatron.doctor.finding import Finding, Wanted, gpus_seen


def gpus(wanted: Wanted) -> Iterator[Finding]:
    if find_spec("torch") is None or wanted.gpus == 0:
        return
    import torch

    names = [torch.cuda.get_device_name(i) for i in range(gpus_seen())]
    text = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none"
    if wanted.gpus is not None and len(names) < wanted.gpus:
        remedy = "look at nvidia-smi, CUDA_VISIBLE_DEVICES and what Slurm was asked for"
        yield Finding("GPUs", "missing", f"{text}; {wanted.gpus} expected", remedy)
    elif not names:
        yield Finding("GPUs", "note", text, "kernels are interpreted on the CPU: for small trials")
    else:
        yield Finding("GPUs", "ok" if len(set(names)) == 1 else "note", text)
    if len(names) > 1:
        yield from _links(len(names))
    elif names:
        yield from _link_of_one()


def _links(count: int) -> Iterator[Finding]:
    import torch

    from flux_megatron.tuning import environment

    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    closed = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if closed:
        text = f"not between {', '.join(f'{i} and {j}' for i, j in closed if i < j)}"
        remedy = "copies go over the host's memory; look at nvidia-smi topo -p2p r"
        yield Finding("peer access", "note", text, remedy)
    else:
        yield Finding("peer access", "ok", f"between all {count} GPUs")
    yield Finding("link", "ok", environment.of(torch.device("cuda", 0)).link)
    from flux_megatron.symm import cuda_memory

    torch.cuda.synchronize(0)
    memory = cuda_memory.Memory(cuda_memory.PAGE_BYTES, torch.device("cuda", 0))
    memory.close()
    if memory.failure:
        remedy = "`signalled` alone overlaps; ask for the driver's cuMemCreate"
        yield Finding("symmetric memory", "note", memory.failure, remedy)
    else:
        yield Finding("symmetric memory", "ok", "the driver makes it")


def _link_of_one() -> Iterator[Finding]:
    """To GPUs of the node that this process does not see, as where each rank sees one."""
    import torch

    from flux_megatron.tuning import link

    if (kind := link.of(torch.device("cuda", 0))) != "unknown":
        yield Finding("link", "ok", f"{link.name(kind)}, to GPUs that this process does not see")


def shared_memory(wanted: Wanted) -> Iterator[Finding]:
    """On the CPU ranks open each other's memory through /proc."""
    if wanted.gpus or (wanted.gpus is None and gpus_seen()):
        return
    descriptor = os.memfd_create("flux_megatron_doctor")
    try:
        file = f"/proc/{os.getpid()}/fd/{descriptor}"
        opened = subprocess.run(["sh", "-c", f": <{file}"], capture_output=True, timeout=30)
    finally:
        os.close(descriptor)
    if opened.returncode == 0:
        yield Finding("shared memory", "ok", "processes open each other's memory files")
    else:
        text = opened.stderr.decode().strip()
        remedy = "run all ranks as one user, in one container"
        yield Finding("shared memory", "missing", text, remedy)


def variables(wanted: Wanted) -> Iterator[Finding]:
    from flux_megatron import settings

    for line in settings.unknown(os.environ).values():
        yield Finding("variable", "note", line)
    try:
        settings.read(os.environ)
    except ValueError as error:
        yield Finding("variable", "missing", str(error), "unset it, or give it such a value")


def connections(wanted: Wanted) -> Iterator[Finding]:
    if not gpus_seen():
        return
    given = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "unset")
    remedy = "" if given == "1" else "export 1: Megatron demands it up to Hopper"
    yield Finding("CUDA connections", "note" if remedy else "ok", given, remedy)

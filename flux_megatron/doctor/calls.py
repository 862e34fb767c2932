"""What calls will run here: which kernels, who makes their driver calls, by which plans."""

from __future__ import annotations

from collections.abc import Iterator

from flux_megatron.doctor.finding import Finding, Wanted, gpus_seen


def kernels(wanted: Wanted) -> Iterator[Finding]:
    """Which kernels `hopper` and `signalled` will run."""
    if not gpus_seen():
        return
    import torch

    from flux_megatron.kernels.hopper import config as hopper_config
    from flux_megatron.kernels.hopper import gemm as hopper_gemm

    reason = hopper_gemm.refuses_bands("cuda", torch.bfloat16, 64, 64, 1, (), hopper_config.TILE)
    text = f"the portable ones run: {reason}" if reason else "run in 16 bits, at aligned sizes"
    yield Finding("Hopper kernels", "note" if reason else "ok", text)


def driver_calls(wanted: Wanted) -> Iterator[Finding]:
    """Who makes those of a call."""
    if not gpus_seen():
        return
    from flux_megatron import settings
    from flux_megatron.symm import enqueue

    if not settings.get().native:
        yield Finding("driver calls", "ok", "Python makes them: FLUX_MEGATRON_NATIVE=0")
    elif reason := enqueue.unavailable():
        yield Finding("driver calls", "note", f"Python makes them, one at a time: {reason}")
    else:
        yield Finding("driver calls", "ok", "C makes them all at once")


def plans(wanted: Wanted) -> Iterator[Finding]:
    if not gpus_seen():
        return
    import torch

    from flux_megatron import settings
    from flux_megatron.tuning import plan_cache

    cache = plan_cache.opened(settings.get().cache, torch.device("cuda", 0))
    fitting = sum(map(cache.is_here, cache.entries))
    text = f"{len(cache.entries)} of this GPU, {fitting} of just this software"
    remedy = "" if fitting else "first calls race a few plans; flux-megatron tune tries all"
    yield Finding("measured plans", "note" if remedy else "ok", text, remedy)

"""Small kernels that push or pull a block with a signal: right once, then broken in many ways."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def push(
    source, target, flag, N,
    BLOCK: tl.constexpr, BARRIER: tl.constexpr, SEM: tl.constexpr, SCOPE: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)[:, None] * N + tl.arange(0, BLOCK)[None, :]
    tl.store(target + at, tl.load(source + at))
    if BARRIER:
        tl.debug_barrier()
    tl.atomic_xchg(flag, 1, sem=SEM, scope=SCOPE)


@triton.jit
def push_tma(
    source, target, flag, N, BLOCK: tl.constexpr, COMPLETE: tl.constexpr, FENCE: tl.constexpr
):
    at = tl.arange(0, BLOCK)[:, None] * N + tl.arange(0, BLOCK)[None, :]
    descriptor = tl.make_tensor_descriptor(target, [N, N], [N, 1], [BLOCK, BLOCK])
    for step in range(0, N):
        descriptor.store([step * BLOCK, 0], tl.load(source + step * BLOCK * N + at))
        if COMPLETE:
            tl.inline_asm_elementwise(
                "{ cp.async.bulk.wait_group 0; mov.u32 $0, 0; }", "=r", [],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
        if FENCE:
            tl.inline_asm_elementwise(
                "{ fence.proxy.async; mov.u32 $0, 0; }", "=r", [],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
        tl.debug_barrier()
        tl.atomic_xchg(flag + step, 1, sem="release", scope="sys")


@triton.jit
def pull(
    source, target, flag, N,
    BLOCK: tl.constexpr, TMA: tl.constexpr, FENCE: tl.constexpr, SEM: tl.constexpr,
    CLOCK: tl.constexpr,
):  # fmt: skip
    turns, going = 0, True
    while going:
        going = tl.atomic_add(flag, 0, sem=SEM, scope="sys") == 0
        turns += 1
        if CLOCK != "none":
            now = tl.inline_asm_elementwise(
                "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
            )
            if CLOCK == "own":
                going = going & (now < 1 << 40)
            elif going:
                late = (now >= 1 << 40).to(tl.int32)
                going = tl.atomic_add(flag + 1, late, sem="relaxed", scope="sys") == 0
    if FENCE:
        tl.inline_asm_elementwise(
            "{ fence.proxy.async; mov.u32 $0, 0; }", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
    at = tl.arange(0, BLOCK)[:, None] * N + tl.arange(0, BLOCK)[None, :]
    if TMA:
        block = tl.make_tensor_descriptor(source, [N, N], [N, 1], [BLOCK, BLOCK]).load([0, 0])
    else:
        block = tl.load(source + at)
    tl.store(target + at, block)


_PUSH = {"BLOCK": 64, "BARRIER": True, "SEM": "release", "SCOPE": "sys"}
_PUSH_TMA = {"BLOCK": 64, "COMPLETE": True, "FENCE": True}
_PULL = {"BLOCK": 64, "TMA": False, "FENCE": False, "SEM": "acquire", "CLOCK": "agreed"}
_PULL_TMA = {**_PULL, "TMA": True, "FENCE": True}

# name -> (kernel, its constexprs); those whose name starts with "right" must pass the checks
BROKEN: dict[str, tuple[triton.JITFunction, dict]] = {
    "right push": (push, _PUSH),
    "push without barrier": (push, {**_PUSH, "BARRIER": False}),
    "push with a relaxed signal": (push, {**_PUSH, "SEM": "relaxed"}),
    "push with a signal for one GPU": (push, {**_PUSH, "SCOPE": "gpu"}),
    "right push by TMA": (push_tma, _PUSH_TMA),
    "push by TMA, not complete": (push_tma, {**_PUSH_TMA, "COMPLETE": False}),
    "push by TMA, not fenced": (push_tma, {**_PUSH_TMA, "FENCE": False}),
    "right pull": (pull, _PULL),
    "pull with a relaxed poll": (pull, {**_PULL, "SEM": "relaxed"}),
    "pull without a clock": (pull, {**_PULL, "CLOCK": "none"}),
    "pull by a clock of each warp": (pull, {**_PULL, "CLOCK": "own"}),
    "right pull by TMA": (pull, _PULL_TMA),
    "pull by TMA, not fenced": (pull, {**_PULL_TMA, "FENCE": False}),
}

"""Memory order of the Hopper kernels: `primitives.py`, said in Gluon. The two spell all of it.

| primitive | order |
| --- | --- |
| `wait_acquire_sys` | the signal, then TMA loads of this CTA; bounded by a deadline |
| `arrives_acquire_sys` | the flag of a stream, then TMA loads of this CTA; it may give up |
| `complete_tma_stores` | TMA stores are in memory, and ordered before a release that follows |
| `count_release_sys` | what has completed, then one arrival for this GPU's copy engine |
| `count_release_gpu`, `wait_acquire_gpu` | the same two among CTAs of one GPU, for plain loads |
| `count_acq_rel_gpu` | joins the stores of several CTAs of one GPU before a single signal |
| `signal_release_sys` | what has been counted, then the signal, seen by any rank |
| `begin_draw`, `begin_claim`, `end_draw` | none: which CTA makes which tile |
| `count_relaxed_gpu` | none: a number that outlives the launch |
| `uniform` | none: the value of one warp's lanes, which are equal, in a uniform register |
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flux_megatron.kernels.gluon_versions import barrier
from flux_megatron.kernels.primitives import arrives_acquire, wait_acquire
from flux_megatron.symm import signals

MAX_COMM_TILES = gl.constexpr(signals.MAX_COMM_TILES)


@gluon.jit
def wait_acquire_sys(pad, slot, epoch, deadline, status):
    """Wait until `slot` of `pad` holds `epoch`; TMA loads that follow see what it announces."""
    wait_acquire(pad, slot, epoch, deadline, status, "sys")
    _acquire_for_tma_loads()


@gluon.jit
def arrives_acquire_sys(flag, waited, patience_us):
    """Whether a stream has set `flag`, or does while CTAs wait for `patience_us`: TMA loads that
    follow see what it announces.
    """
    here = arrives_acquire(flag, waited, patience_us)
    _acquire_for_tma_loads()
    return here


@gluon.jit
def _acquire_for_tma_loads():
    barrier()  # one thread has acquired; the one that issues the load may be another
    gl.inline_asm_elementwise(
        "{ fence.proxy.async; mov.u32 $0, 0; }", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_acquire_gpu(counters, counter, count, deadline, status):
    """Wait until `counter` of `counters` is at `count`; loads of this partition's threads that
    follow see what was stored before.
    """
    wait_acquire(counters, counter, count, deadline, status, "gpu")
    barrier()


@gluon.jit
def complete_tma_stores():
    """This CTA's TMA stores are in memory; `tma.store_wait` says only that they are read."""
    gl.inline_asm_elementwise(
        "{ cp.async.bulk.wait_group 0; fence.proxy.async; mov.u32 $0, 0; }",
        "=r", [], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    barrier()


@gluon.jit
def begin_draw(counter):
    """Count one up in a partition of one warp, without a wait for the number: `end_draw` has it."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .u32 lane;
        mov.u32 lane, %laneid;
        setp.eq.u32 first, lane, 0;
        mov.u32 $0, 0;
        @first atom.relaxed.gpu.global.add.u32 $0, [$1], 1;
        }""",
        "=&r,l", [counter.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def end_draw(ticket):
    """The number that `begin_draw` has drawn, in a uniform register: 0, 1, 2, ..."""
    return gl.inline_asm_elementwise(
        "redux.sync.add.s32 $0, $1, 0xffffffff;", "=r,r", [ticket],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def begin_claim(word):
    """Claim the word for this partition of one warp, without a wait for the answer: `end_draw` has
    0 if it is the first.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .u32 lane;
        mov.u32 lane, %laneid;
        setp.eq.u32 first, lane, 0;
        mov.u32 $0, 0;
        @first atom.relaxed.gpu.global.exch.b32 $0, [$1], 1;
        }""",
        "=&r,l", [word.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def uniform(value):
    """A value that is the same in all lanes. What depends on it stays out of vector registers, as
    the loop over K must.
    """
    return gl.inline_asm_elementwise(
        "redux.sync.max.s32 $0, $1, 0xffffffff;", "=r,r", [value],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def here(value):
    """The same number, but what is computed from it is computed here: LLVM would move it in front
    of the loop in which worker warps await their partition, where a warp has 24 registers.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [value], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def count_release_sys(counter):
    """Count one arrival for the copy engine of this GPU, after what has completed."""
    gl.atomic_add(counter, 1, sem="release", scope="sys")


@gluon.jit
def count_release_gpu(counter):
    """Count one arrival for CTAs of this GPU, after what has completed."""
    gl.atomic_add(counter, 1, sem="release", scope="gpu")


@gluon.jit
def count_relaxed_gpu(counter):
    """Count one arrival; gives its number, from 1 on."""
    return gl.atomic_add(counter, 1, sem="relaxed", scope="gpu") + 1


@gluon.jit
def count_acq_rel_gpu(counter, arrivals):
    """Count one arrival; True for the last of `arrivals`, which resets the counter."""
    last = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == arrivals - 1
    if last:
        gl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")
    return last


@gluon.jit
def signal_release_sys(pad, slot, epoch):
    """Announce `epoch` in `slot` of a pad, after what has completed and been counted."""
    barrier()
    gl.atomic_xchg(pad + slot, epoch, sem="release", scope="sys")

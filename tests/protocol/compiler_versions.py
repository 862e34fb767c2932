"""What Triton's compilers do differently, as far as the checks of their code depend on it; no other
test does.

| Triton | 3.6, 3.7 | 3.8 | 3.9 |
| --- | --- | --- | --- |
| completes TMA stores before a release | no | yes | yes |
| adds a barrier of the CTA before it | no | no | yes |
| its assembler spills up to, in bytes | 0 | 8 | 32 |

The compiler repairs the broken kernels that lack what it adds. 3.9 moves the descriptor of an MMA
once a k-tile in one configuration more.
"""

from __future__ import annotations

from triton.backends.nvidia import compiler

from flux_megatron.versions.triton import TRITON

COMPLETES, ADDS_BARRIERS = TRITON.since("3.8"), TRITON.since("3.9")

REPAIRED = {"push by TMA, not complete"} if COMPLETES else set()
REPAIRED |= {"push without barrier"} if ADDS_BARRIERS else set()
SPILLED_BYTES_MAX = 32 if ADDS_BARRIERS else 8 if COMPLETES else 0

# One move a k-tile, of the number of the warp group, before the first MMA and while the last is in
# flight: a candidate of the tuner, and dgrads of AG+GEMM, which alone are at .99 to 1.04 of cuBLAS
# with it (H200, M 512 to 2048, 2026-11-23, docs/results/h200/gemm_slices.jsonl).
MOVED = {
    "gemm_rs bfloat16 nn 128x256 copy_engine late early last",
    "ag_gemm bfloat16 nn 128x256 bias",
    "ag_gemm bfloat16 nn 128x320 bias",
}
if ADDS_BARRIERS:
    MOVED |= {"gemm_rs bfloat16 nn 128x256 sm late early last"}


def assembler(architecture: int = 90) -> str:
    """The path of the ptxas that this Triton calls for sm_<architecture>."""
    return compiler.get_ptxas(architecture).path

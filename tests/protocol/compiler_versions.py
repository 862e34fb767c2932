"""What Triton's compilers do differently, as far as the checks of their code depend on it. No other
test asks which version it is.

From 3.9 on the compiler adds a CTA barrier and the completion of TMA stores before a release: two
of the broken kernels are repaired. Its assembler spills up to 32 bytes where 3.6 to 3.8 spill none,
and moves the descriptor of an MMA once a k-tile in one configuration more.
"""

from __future__ import annotations

import triton
from triton.backends.nvidia import compiler

_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
_ADDS_BARRIERS = _VERSION >= (3, 9)

REPAIRED = {"push without barrier", "push by TMA, not complete"} if _ADDS_BARRIERS else set()
SPILLED_BYTES_MAX = 32 if _VERSION >= (3, 9) else 0

# One move a k-tile, of the number of the warp group, before the first MMA and while the last is in
# flight: candidates of the tuner, never a default.
MOVED = {"gemm_rs bfloat16 nn 128x256 copy_engine late early last"}
if _VERSION >= (3, 9):
    MOVED |= {"gemm_rs bfloat16 nn 128x256 sm late early last"}


def assembler(architecture: int = 90) -> str:
    """The path of the ptxas that this Triton calls for sm_<architecture>."""
    return compiler.get_ptxas(architecture).path

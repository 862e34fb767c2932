"""What Triton's compilers do differently, as far as the checks of their code depend on it; no other
test does.

| Triton | 3.6, 3.7 | 3.8 | 3.9 |
| --- | --- | --- | --- |
| completes TMA stores before a release | no | yes | yes |
| adds a barrier of the CTA before it | no | no | yes |
| its assembler spills up to, in bytes | 0 | 8 | 32 |
"""

from __future__ import annotations

from triton.backends.nvidia import compiler

from flux_megatron.versions.triton import TRITON

COMPLETES, ADDS_BARRIERS = TRITON.since("3.8"), TRITON.since("3.9")
SPILLED_BYTES_MAX = 32 if ADDS_BARRIERS else 8 if COMPLETES else 0

# Some more, touched once a tile: beside warps of 72 registers that copy local rows, and in the
# producer warp of rows that come in parts of K.
SPILLED = dict.fromkeys(
    ("ag_gemm bfloat16 nn 128x256 bias", "ag_gemm bfloat16 nn 128x256 bias long"),
    24 if COMPLETES else 12,
)
if COMPLETES:
    SPILLED["ag_gemm bfloat16 nt 128x256 plain parts"] = 20


def assembler(architecture: int = 90) -> str:
    """The path of the ptxas that this Triton calls for sm_<architecture>."""
    return compiler.get_ptxas(architecture).path

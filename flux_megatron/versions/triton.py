"""Triton. Gluon's moved names are in `kernels.gluon_versions`, which needs no version to find them.

| | 3.6 | 3.7 | 3.8 | 3.9 |
| --- | --- | --- | --- | --- |
| a compiled kernel is launched by `compiled.run` | yes | yes | yes | yes |
| that expands host descriptors by itself | no | yes | yes | yes |
| `runtime.build` compiles C, `make_tensordesc_arg` makes descriptors | yes | yes | yes | yes |
| the interpreter's `range` takes numpy's arrays of one number | no | yes | yes | yes |
| the compiler completes TMA stores before a release | no | no | yes | yes |
| and adds a barrier of the CTA before it | no | no | no | yes |

Triton 3.5 was tried: its interpreter replaces the language in another way, and its Gluon has
another `warp_specialize`.
"""

from __future__ import annotations

from flux_megatron.versions.library import Library, release

TRITON = Library("triton", "triton", oldest="3.6", newest="3.9")

_RUN_DIRECTLY = {(3, 6), (3, 7), (3, 8), (3, 9)}


def runs_directly() -> bool:
    """Whether `compiled.run` takes what a launch of a kernel ends with, hooks aside."""
    version = TRITON.version()
    return version is not None and release(version) in _RUN_DIRECTLY


def run_expands_descriptors() -> bool:
    """Whether `compiled.run` takes host descriptors; else its caller expands them."""
    version = TRITON.version()
    return version is not None and release(version) != (3, 6)

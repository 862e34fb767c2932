"""Memory order in one compiled kernel of each kind: what another version of Triton is tried with.
`test_ptx` and `test_hopper_ptx` check every configuration. Needs no GPU.
"""

from __future__ import annotations

import pytest
from compiled_apart import named
from hopper_order import CHECKS as HOPPER_CHECKS
from ptx_order import CHECKS, parsed

SCRIPT = "compile_sample.py"
pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_portable_kernels_keep_their_order(compiled, architecture):
    kernels = {name.split()[1]: k for name, k in named(compiled, architecture).items()}
    assert kernels.keys() == CHECKS.keys()
    for kind, kernel in kernels.items():
        for check in CHECKS[kind]:
            check(parsed(kernel["ptx"]))


def test_hopper_kernels_keep_their_order(compiled):
    kernels = {name.split()[1]: k for name, k in named(compiled, "hopper").items()}
    assert kernels.keys() == HOPPER_CHECKS.keys() - {"sm"}  # a way, not a kernel
    for kind, kernel in kernels.items():
        for check in HOPPER_CHECKS[kind]:
            check(parsed(kernel["ptx"]))

"""Once a layer's kinds have been compiled ahead, no call of training launches other code. Needs no
GPU.
"""

from __future__ import annotations

import pytest
from compiled_apart import NEEDS_OFFLINE_CALLS, compiled_by

pytestmark = [
    pytest.mark.timeout(900),  # all is compiled, beside other tests
    *NEEDS_OFFLINE_CALLS,
]


def test_calls_of_any_rows_launch_what_was_compiled_ahead(tmp_path):
    """And layers of other sizes find all of theirs with the first."""
    written = compiled_by("ahead_calls.py", tmp_path)
    assert not written["missed"], "\n".join(written["missed"])
    kernels = written["kernels"]
    assert {"hopper_ag_gemm_kernel", "hopper_gemm_rs_kernel"} <= {*kernels}
    # for multiples of 16 too
    assert kernels["reduce_received_kernel"] == kernels["wait_sources_kernel"] == 1
    assert {"hopper_ag_gemm_kernel", "hopper_gemm_rs_kernel"} <= {*written["fp8"]}
    assert written["later"] == []

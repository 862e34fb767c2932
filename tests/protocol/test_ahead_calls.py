"""Once a layer's kinds have been compiled ahead, no call of training launches other code. Needs no
GPU.
"""

from __future__ import annotations

import fake_driver
import pytest
import torch
from compiled_apart import compiled_by

from flux_megatron.versions.triton import TRITON

pytestmark = [
    pytest.mark.timeout(900),  # all is compiled, beside other tests
    pytest.mark.skipif(not TRITON.since("3.6"), reason="this Triton has no Gluon for Hopper"),
    pytest.mark.skipif(not fake_driver.compiler(), reason="no C compiler"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="this torch loads a driver itself"),
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

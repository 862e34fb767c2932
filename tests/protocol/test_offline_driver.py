"""What the Hopper kernels' launches hand to the driver in this version of Triton. Needs no GPU.

Triton 3.6 builds its launcher against the driver's library, and 3.5 has no Gluon for Hopper.
"""

from __future__ import annotations

import pytest
from compiled_apart import written_by

from flux_megatron.versions.triton import TRITON, run_expands_descriptors, runs_directly

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not TRITON.since("3.7"), reason="this Triton launches by a GPU's driver"),
]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict:
    """Written only if what asks an unknown Triton for its code could compile it."""
    return written_by("offline_driver.py", tmp_path_factory.mktemp("offline"))


def test_a_direct_launch_hands_over_what_triton_s_own_does(written):
    assert runs_directly()
    assert run_expands_descriptors()
    first, *direct = written["launches"]
    assert len(direct) == written["counted"] - 1 == 2
    for other in direct:
        # but for the record that Triton makes for hooks, and the hooks, of which there are none
        differ = [i for i, (a, b) in enumerate(zip(first, other, strict=True)) if a != b]
        assert set(differ) <= {8, 9, 10}

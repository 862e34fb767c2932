"""One Slurm for all tests of this process."""

from __future__ import annotations

import pytest
from slurm_cluster import SlurmCluster, why_unavailable


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    if reason := why_unavailable():
        pytest.skip(reason)
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster

"""One mode a process:

without a GPU the kernels are interpreted, which Triton decides at its first import.
"""

from __future__ import annotations

import os
import sys
import tempfile

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("FLUX_MEGATRON_TIMEOUT_S", "20")
os.environ.setdefault("FLUX_MEGATRON_POISON", "1")
# what the user has measured does not count here, and nothing is added to it
_cache = tempfile.TemporaryDirectory(prefix="flux_megatron-")
os.environ["FLUX_MEGATRON_CACHE"] = _cache.name

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

# no time limit an example: on two shared cores any line may take a second
hypothesis.settings.register_profile("flux_megatron", deadline=None)
hypothesis.settings.load_profile("flux_megatron")

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)


def pytest_itemcollected(item: pytest.Item) -> None:
    """`device` marks what runs on GPUs where there are some."""
    if hasattr(getattr(item, "module", None), "on_device"):
        item.add_marker("device")


def pytest_sessionfinish() -> None:
    if "rank_pool" in sys.modules:
        sys.modules["rank_pool"].stop_all()

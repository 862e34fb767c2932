"""What a measured plan depends on: the sources that calls run, and how a GPU is joined to others,
which CUDA says of visible ones, else NVML of the node's; both are pretended.
"""

import ctypes
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from flux_megatron.tuning import link
from flux_megatron.tuning.environment import PACKAGE, ROOMS, sources_digest


@pytest.mark.parametrize(
    ("file", "stale"),
    [("kernels/hopper/gemm.py", True), ("kernels/new.py", True), ("overlap/fused.py", True),
     ("expert_parallel/fused.py", True), ("symm/enqueue.c", True), ("symm/notes.txt", False),
     ("nn/linear.py", False)],
)  # fmt: skip
def test_an_edit_of_what_runs_makes_plans_stale(tmp_path, file, stale):
    assert all([*(PACKAGE / room).glob("*.py")] for room in ROOMS)
    for room in (*ROOMS, "kernels/hopper", "nn"):
        (tmp_path / room).mkdir()
        for name in ("gemm.py", "fused.py", "enqueue.c", "notes.txt", "linear.py"):
            (tmp_path / room / name).write_text("a = 1\n")
    before = sources_digest.__wrapped__(tmp_path)
    assert sources_digest.__wrapped__(tmp_path) == before
    (tmp_path / file).write_text("a = 2\n")
    assert (sources_digest.__wrapped__(tmp_path) != before) == stale


def test_plans_of_a_commit_get_the_digest_of_today(tmp_path, monkeypatch):
    """Here HEAD stands for the commit; its digest is another one where the tree differs."""
    script = Path(__file__).parents[1] / "scripts/rekey_plans.py"
    main = runpy.run_path(str(script), run_name="not main")["main"]
    digest = main.__globals__["sources_digest"]
    monkeypatch.setitem(
        main.__globals__, "sources_digest", lambda *of: digest(*of) if of else "today"
    )
    monkeypatch.chdir(script.parents[1])
    file = tmp_path / "plans.json"
    subprocess.run(["git", "archive", "-o", tmp_path / "it", "HEAD", "flux_megatron"], check=True)
    subprocess.run(["tar", "-x", "-C", tmp_path, "-f", tmp_path / "it"], check=True)
    there = digest.__wrapped__(tmp_path / "flux_megatron")
    file.write_text(f'{{"sources": "{there}"}}, {{"sources": "other"}}')
    main(file, "HEAD")
    assert file.read_text() == '{"sources": "today"}, {"sources": "other"}'


UUIDS = [b"GPU-a", b"GPU-b", b"GPU-c"]


def nvml(gpus: int, status: dict[tuple[int, int], int]) -> SimpleNamespace:
    """The handle of a GPU is its number + 1; `status` is that between two."""

    def answer(place, value: int) -> int:
        place._obj.value = value
        return 0

    def between(a, b, what: int, place) -> int:
        assert what == 3
        return answer(place, status.get((a.value - 1, b.value - 1), 0))

    return SimpleNamespace(
        nvmlInit_v2=lambda: 0,
        nvmlDeviceGetCount_v2=lambda place: answer(place, gpus),
        nvmlDeviceGetHandleByUUID=lambda uuid, place: answer(place, UUIDS.index(uuid) + 1),
        nvmlDeviceGetHandleByIndex_v2=lambda index, place: answer(place, index + 1),
        nvmlDeviceGetP2PStatus=between,
    )


@pytest.fixture
def seen(monkeypatch):
    def seen(visible: int, nvml: SimpleNamespace | OSError, atomics: int = 1) -> str:
        driver = mock.MagicMock()
        driver.CUresult.CUDA_SUCCESS = 0
        kind = driver.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
        driver.cuDeviceGetP2PAttribute = lambda what, a, b: (0, atomics if what is kind else None)
        monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
        properties = SimpleNamespace(uuid="b")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(ctypes, "CDLL", mock.Mock(side_effect=[nvml]))
        return link.of(torch.device("cuda", 0))

    return seen


def test_gpus_that_are_not_visible_are_asked_by_nvml(seen, monkeypatch):
    """Others by CUDA; a GPU alone has no known link. What a process does not see is another one."""
    assert seen(2, OSError("no NVML")) == "nvlink"
    assert seen(2, OSError("no NVML"), atomics=0) == "pcie"
    assert seen(1, nvml(3, {})) == "nvlink, hidden"
    assert seen(1, nvml(3, {(1, 2): 5})) == "pcie, hidden"
    assert seen(1, nvml(3, {(0, 2): 5, (1, 1): 5})) == "nvlink, hidden", "it is the second one"
    assert seen(1, OSError("no NVML")) == "unknown"
    monkeypatch.setattr(sys.modules[__name__], "UUIDS", [b"GPU-b"])
    assert seen(1, nvml(1, {})) == "unknown"

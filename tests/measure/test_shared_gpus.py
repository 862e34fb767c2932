"""Ranks that share GPUs: which one each takes, and by which name NCCL takes it."""

from __future__ import annotations

import importlib
import os
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import typer

from flux_megatron.lab.measure import gpu_run, rl_rank
from flux_megatron.symm import cuda_memory, places
from flux_megatron.symm.cuda_memory import SHARED_GPUS

ALLOWED = {SHARED_GPUS: "1"}
CASES = {  # ranks, GPUs, variables: the GPU of rank 1, its machine
    "one GPU": (2, 1, ALLOWED, "0", "machine of rank 1"),
    "two of four": (4, 2, ALLOWED, "1", "machine of rank 1"),
    "a GPU each": (2, 2, ALLOWED, "1", None),
    "not allowed": (2, 1, {SHARED_GPUS: "0"}, "1", None),
    "no GPU": (2, 0, ALLOWED, "1", None),
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_of_torchrun_share_gpus_that_are_too_few(case, monkeypatch):
    ranks, gpus, variables, gpu, machine = CASES[case]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    given = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": str(ranks), **variables}
    with mock.patch.dict(os.environ, given):
        os.environ.pop("NCCL_HOSTID", None)
        gpu_run.share_gpus()
        assert (os.environ["LOCAL_RANK"], os.environ.get("NCCL_HOSTID")) == (gpu, machine)


@pytest.mark.parametrize(("links", "variable", "machine"), [
    ("memory", "NCCL_P2P_DISABLE", "machine 3"), ("sockets:2", "NCCL_HOSTID", "machine 1"),
    ("mailboxes", "NCCL_P2P_DISABLE", "one"),
])  # fmt: skip
def test_ranks_that_are_machines(links, variable, machine, monkeypatch):
    monkeypatch.setattr(places, "machine", lambda: "one")
    monkeypatch.setattr(cuda_memory, "why_not_shared", cuda_memory.why_not_shared)
    with mock.patch.dict(os.environ, {"RANK": "3"}):
        for name in ("NCCL_P2P_DISABLE", "NCCL_HOSTID"):
            os.environ.pop(name, None)
        assert gpu_run.be_apart(links) == gpu_run.LINKS[links.partition(":")[0]]
        assert places.machine() == machine
        assert {"NCCL_P2P_DISABLE", "NCCL_HOSTID"} & {*os.environ} == {variable}
        with pytest.raises(
            typer.BadParameter, match="'nvlink' given, memory or sockets or mailboxes"
        ):
            gpu_run.be_apart("nvlink:2")


def test_workers_of_ray_share_gpus(monkeypatch):
    """Ray gave this worker the second GPU of one."""
    shown: list[list[int]] = []
    manager = SimpleNamespace(set_current_process_visible_accelerator_ids=shown.append)
    ray = SimpleNamespace(get_gpu_ids=lambda: ["1"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setitem(sys.modules, "ray", ray)
    at = "ray._private.accelerators.nvidia_gpu"
    monkeypatch.setitem(sys.modules, at, SimpleNamespace(NvidiaGPUAcceleratorManager=manager))
    with mock.patch.dict(os.environ):
        gpu_run.share_gpus_of_ray()
        assert os.environ["NCCL_HOSTID"] == f"machine of process {os.getpid()}"
    manager.set_current_process_visible_accelerator_ids(["1"])
    assert (ray.get_gpu_ids(), shown) == ([0], [[0]])


def test_what_begins_cuda_waits_for_the_framework_s_own_import(monkeypatch):
    """Once, and before the module runs."""
    done: list[bool] = []
    name = "wave"  # of the standard library, imported by nobody here
    monkeypatch.delitem(sys.modules, name, raising=False)
    before = rl_rank.Before(name, lambda: done.append(name in sys.modules))
    monkeypatch.setattr(sys, "meta_path", [before, *sys.meta_path])
    importlib.import_module("colorsys")
    assert done == []
    for _ in range(2):
        importlib.import_module(name)
        monkeypatch.delitem(sys.modules, name)
    assert done == [False]

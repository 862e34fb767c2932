"""The order in which the host enqueues a call: the GPU's own with CUDA_DEVICE_MAX_CONNECTIONS=1."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from flux_megatron.kernels.triton_launch import Launcher
from flux_megatron.overlap import fused, pipelined
from flux_megatron.problem import Plan, Tile
from flux_megatron.symm.cpu_backend import CpuCopyEngine
from flux_megatron.symm.workspace import workspace

GEMMS = {"pipelined": pipelined, "fused": fused}


@pytest.mark.parametrize("strategy", GEMMS)
def test_the_local_shard_is_copied_behind_the_gemms(strategy):
    """In front of them GEMMs would wait for the copy, and the copy for all pushes."""
    for enqueued in run_ranks(_enqueued, 2, strategy):
        gemms = [at for at, what in enumerate(enqueued) if what == "gemm"]
        assert enqueued[: gemms[0]] == ["copy"], "the push comes first"
        assert enqueued[gemms[-1] + 1 :] == ["copy", "consumed"]


def _enqueued(rank: int, strategy: str) -> list[str]:
    seen: list[str] = []

    def noting(what: str, original):
        def call(*given, **named):
            seen.append(what)
            return original(*given, **named)

        return call

    x, w = torch.full((4, 16), 1.0 + rank), torch.ones(16, 16)

    def consume(gathered: torch.Tensor) -> None:
        seen.append("consumed")
        assert torch.equal(gathered[:, 0], torch.tensor([1.0] * 4 + [2.0] * 4))

    launch = Launcher.launch

    def launched(launcher: Launcher, *given: object) -> None:
        if launcher.name == "ag_gemm":
            seen.append("gemm")
        launch(launcher, *given)

    with (
        mock.patch.object(CpuCopyEngine, "copy", noting("copy", CpuCopyEngine.copy)),
        mock.patch.object(Launcher, "launch", launched),
        mock.patch.object(pipelined, "_gemm", noting("gemm", pipelined._gemm)),
    ):
        space = workspace(dist.group.WORLD, x.device)
        plan = Plan(strategy, tile=Tile(16, 16, 16))
        GEMMS[strategy].ag_gemm(x, w, None, "nn", plan, space, consume)
    return seen

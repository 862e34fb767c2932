"""The order in which the host enqueues a call: the GPU's own with CUDA_DEVICE_MAX_CONNECTIONS=1."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import on_cpu_ranks

from flux_megatron.kernels import ag_gemm as ag_gemm_kernels
from flux_megatron.overlap import fused, pipelined
from flux_megatron.problem import Plan, Tile
from flux_megatron.symm.cpu_backend import CpuCopyEngine
from flux_megatron.symm.workspace import workspace

GEMMS = {"pipelined": (pipelined, "_multiply"), "fused": (ag_gemm_kernels, "ag_gemm")}
RUN = {"pipelined": pipelined.ag_gemm, "fused": fused.ag_gemm}


@pytest.mark.parametrize("strategy", GEMMS)
@on_cpu_ranks(2)
def test_the_local_shard_is_copied_behind_the_gemms(rank, strategy):
    """In front of them GEMMs would wait for the copy, and the copy for all pushes."""
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

    module, name = GEMMS[strategy]
    with (
        mock.patch.object(CpuCopyEngine, "copy", noting("copy", CpuCopyEngine.copy)),
        mock.patch.object(module, name, noting("gemm", getattr(module, name))),
    ):
        space = workspace(dist.group.WORLD, x.device)
        plan = Plan(strategy, tile=Tile(16, 16, 16))
        RUN[strategy](x, w, None, "nn", plan, space, consume)
    gemms = [at for at, what in enumerate(seen) if what == "gemm"]
    assert seen[: gemms[0]] == ["copy"], "the push comes first"
    assert seen[gemms[-1] + 1 :] == ["copy", "consumed"]

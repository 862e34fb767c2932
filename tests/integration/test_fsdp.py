"""Megatron-FSDP's view of our layers is that of the classes in whose place they stand."""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import side_by_side as sbs
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig
from ranks import run_ranks
from torch.distributed import DeviceMesh
from training_cases import LLAMA, two_streams
from training_run import SEQUENCE, Feature, Training, _batches, _forward_step

import flux_megatron
from flux_megatron.integration import stand_ins
from flux_megatron.lab import cpu

ADAPTER = "megatron.core.distributed.fsdp.mcore_fsdp_adapter"
DETECT = "_detect_parallelism_type"


class GoesByNames:
    """As the adapter of 0.18 and newer."""

    def _detect_parallelism_type(self, param_name, module):
        kind = type(module).__name__
        if kind == "TELayerNormColumnParallelLinear" and not param_name.startswith("layer_norm"):
            return "column"
        row = "replicated" if param_name == "bias" else "row"
        by_name = {
            "ColumnParallelLinear": "column", "TEColumnParallelLinear": "column",
            "RowParallelLinear": row, "TERowParallelLinear": row,
        }  # fmt: skip
        return by_name.get(kind) or ("replicated" if "Norm" in kind else None)


COLUMN = {"weight": "column", "bias": "column"}
ROW = {"weight": "row", "bias": "replicated"}
VIEWS = {
    stand_ins.ColumnParallelLinear: COLUMN,
    stand_ins.TEColumnParallelLinear: COLUMN,
    stand_ins.RowParallelLinear: ROW,
    stand_ins.TERowParallelLinear: ROW,
    stand_ins.TELayerNormColumnParallelLinear: {
        "layer_norm_weight": "replicated", "layer_norm_bias": "replicated",
        "weight": "column", "bias": "column",
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", VIEWS)
@sbs.on_tp_ranks(2)
def test_parameters_are_those_of_the_replaced_class(rank, kind):
    more = {"input_is_parallel": True} if VIEWS[kind] is ROW else {"gather_output": False}
    layer = kind(
        8, 8, config=sbs.settings(2, True, torch.float32), bias=True, skip_bias_add=False,
        init_method=torch.nn.init.xavier_normal_, is_expert=False, **more,
    )  # fmt: skip
    module = importlib.import_module(ADAPTER)
    adapters = [one for one in vars(module).values() if isinstance(one, type)]
    for adapter in [GoesByNames, *(one for one in adapters if DETECT in vars(one))]:
        detect = vars(adapter)[DETECT]
        names = [name for name, _ in layer.named_parameters()]
        assert {name: detect(adapter, name, layer) for name in names} == VIEWS[kind]


@contextlib.contextmanager
def on_cpu(adapter: Any) -> Iterator[None]:
    """Megatron-FSDP is built for the GPU 0, which is the CPU."""
    mesh_of = DeviceMesh.from_group
    ranks = torch.arange(dist.get_world_size())

    def mesh(dp: Any, tp: Any, **_: Any) -> torch.Tensor:  # without einops
        return ranks.view(dp.size(), tp.size())

    def as_cuda(value: Any) -> bool:
        return value == 0 if type(value) is int else str(value).startswith("cuda")

    def of_gloo(groups: Any, device_type: str, **options: Any) -> Any:
        return mesh_of(groups, "cpu", **options)

    of_te = {"TELinear": type("TELinear", (), {}), "is_te_min_version": lambda *_, **__: True}
    with (
        two_streams(),
        mock.patch.multiple(adapter, create=True, **of_te),
        mock.patch.object(adapter, "_get_dp_tp_mesh", mesh),
        mock.patch.object(DeviceMesh, "from_group", of_gloo),
        mock.patch.object(cpu, "_is_cuda", as_cuda),
    ):
        yield


def wrapped(config: Any, model: Any, strategy: str) -> Any:
    adapter = importlib.import_module(ADAPTER)
    ddp = DistributedDataParallelConfig(
        use_megatron_fsdp=True, use_distributed_optimizer=True, overlap_grad_reduce=True,
        overlap_param_gather=True, grad_reduce_in_fp32=True, gradient_reduce_div_fusion=False,
        data_parallel_sharding_strategy=strategy,
    )  # fmt: skip
    with on_cpu(adapter), mock.patch.object(torch.cuda, "current_device", return_value=0):
        found = adapter.FullyShardedDataParallel(config, ddp, model)
    for each in gc.get_objects():  # autograd's calls, of which `pretend_cuda` sees nothing, ask it
        if "megatron_fsdp" in str(type(each).__module__) and hasattr(each, "device"):
            each.device = torch.device("cpu")
    return found


@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
@pytest.mark.parametrize("fusion", [False, True])
def test_megatron_fsdp_beside_tensor_parallelism_follows_stock(fusion, strategy):
    """Gradients of two micro-batches, TP 2 x DP 2; a rank has those of its own shard."""
    sbs.skip_before("0.15", "it asks newer torch for what its meshes lack")
    environment = {"FLUX_MEGATRON_STRATEGY": "pipelined"}
    shards = run_ranks(_gradients, 4, fusion, strategy, environment=environment)
    for stock, ours, report in shards:
        torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-5)
        assert report.overlapped == report.total == 4 * 9
    assert len(set().union(*(stock for stock, _, _ in shards))) == 16


def _gradients(rank: int, fusion: bool, strategy: str) -> tuple[Any, ...]:
    feature = Feature(dp=2, config={**LLAMA, "gradient_accumulation_fusion": fusion})
    sbs.give_stock_a_wgrad_kernel()
    found = []
    for layers in ("stock", "flux"):
        training = Training(feature, layers)
        flux_megatron.reset_report()
        model = wrapped(training.config, training._model(0), strategy)
        with two_streams():
            losses = []
            for batch in range(2):
                loss, _ = _forward_step(_batches(batch, SEQUENCE, 1), model)
                loss.mean().backward()
                losses.append(loss.mean().detach())
            model.finish_grad_sync()
        gradients = {
            n: p.grad.to_local() for n, p in model.module.named_parameters() if p.grad is not None
        }
        found.append({"loss": torch.stack(losses), **gradients})
    return *found, flux_megatron.report()

"""A stock layer and ours: built from the same seed, given the same input."""

from __future__ import annotations

import argparse
import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.extensions import transformer_engine
from megatron.core.tensor_parallel import layers as stock
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from ranks import on_cpu_ranks

import flux_megatron
from flux_megatron.integration.flags import add_flux_arguments
from flux_megatron.integration.layers import FluxColumnParallelLinear, FluxRowParallelLinear
from flux_megatron.lab.cpu import pretend_cuda
from flux_megatron.versions.megatron_core import MEGATRON_CORE

SEQUENCE, BATCH, HIDDEN, FFN = 8, 3, 20, 24
PAIRS = {
    "column": (stock.ColumnParallelLinear, FluxColumnParallelLinear),
    "row": (stock.RowParallelLinear, FluxRowParallelLinear),
}


@dataclass(frozen=True)
class Case:
    """One way to use a layer.

    `prepare` is given each layer before its forward; `call` gives more arguments of forward.
    """

    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[Any], None] = lambda layer: None
    call: Callable[[Any], dict[str, Any]] = lambda layer: {}
    only_sp: bool | None = None  # True, False: makes sense with, without sequence parallelism
    frozen_input: bool = False

    def runs_with(self, sp: bool) -> bool:
        return self.only_sp is None or self.only_sp == sp


def on_tp_ranks(world_size: int, **options: Any) -> Callable[[Callable], Callable]:
    """`on_cpu_ranks` behind `start`, with one tensor-parallel group."""

    def of_body(body: Callable) -> Callable:
        @functools.wraps(body)
        def started(rank: int, *given: Any) -> None:
            start(world_size)
            body(rank, *given)

        return on_cpu_ranks(world_size, **options)(started)

    return of_body


def parse(*given: str) -> argparse.Namespace:
    """Our arguments and one of Megatron's, before it validates them."""
    parser = add_flux_arguments(argparse.ArgumentParser())
    parser.add_argument("--transformer-impl", default="transformer_engine")
    return parser.parse_args(given)


def start(tp: int, **more: Any) -> None:
    """Megatron's groups and seeds in this rank."""
    if not parallel_state.is_initialized():
        pretend_cuda()
    stop()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, **more)
    seed()


def seed() -> None:
    tensor_parallel.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    torch.manual_seed(7)


def stop() -> None:
    """Megatron forgets its process groups, and each gloo group keeps threads."""
    parallel_state.destroy_model_parallel()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def settings(tp: int, sp: bool, dtype: torch.dtype, **more: Any) -> TransformerConfig:
    given = {
        "num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 4,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "masked_softmax_fusion": False,
        "tensor_model_parallel_size": tp, "sequence_parallel": sp and tp > 1,
        "use_cpu_initialization": True, "params_dtype": dtype, "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16, **more,
    }  # fmt: skip
    return TransformerConfig(**given)


def give_stock_a_wgrad_kernel() -> None:
    """A stand-in for apex's extension, in stock's module alone: ours is to do without."""

    def accumulate(x: torch.Tensor, dy: torch.Tensor, main_grad: torch.Tensor) -> None:
        main_grad.copy_(main_grad.float() + dy.t().float() @ x.float())

    kernels = {f"wgrad_gemm_accum_fp{bits}": accumulate for bits in (16, 32)}
    stock.fused_weight_gradient_mlp_cuda = types.SimpleNamespace(**kernels)
    stock._grad_accum_fusion_available = True


@contextlib.contextmanager
def splits_as_lists() -> Iterator[None]:
    """Megatron's all-to-all takes splits that lie on the CPU as they are there after a copy from a
    GPU.
    """
    exchange = token_dispatcher.all_to_all

    def with_lists(group: Any, rows: torch.Tensor, *splits: Any, **more: Any) -> torch.Tensor:
        lists = (s.tolist() if isinstance(s, torch.Tensor) else s for s in splits)
        return exchange(group, rows, *lists, **more)

    with mock.patch.object(token_dispatcher, "all_to_all", with_lists):
        yield


def build(case: Case, ours: bool, config: Any) -> Any:
    seed()
    defaults = {"bias": True, "skip_bias_add": False, "keep_master_weight_for_test": True}
    defaults |= {"gather_output": False} if case.kind == "column" else {"input_is_parallel": True}
    layer = PAIRS[case.kind][ours](
        *((HIDDEN, FFN) if case.kind == "column" else (FFN, HIDDEN)),
        config=config, init_method=torch.nn.init.xavier_normal_, **{**defaults, **case.options},
    )  # fmt: skip
    if layer.bias is not None:
        torch.nn.init.normal_(layer.bias)
        if case.kind == "row":
            dist.broadcast(layer.bias.data, 0)
    case.prepare(layer)
    return layer


def operands(case: Case, sp: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """What this rank is given for x and for dy, in fp64."""
    generator = torch.Generator().manual_seed(11)
    widths = (HIDDEN, FFN) if case.kind == "column" else (FFN, HIDDEN)
    x, dy = (torch.randn(SEQUENCE, BATCH, n, generator=generator).double() for n in widths)
    if case.kind == "column":
        return (share(x, 0) if sp else x), share(dy, 2)
    parallel = case.options.get("input_is_parallel", True)
    return (share(x, 2) if parallel else x), (share(dy, 0) if sp else dy)


def use(case: Case, layer: Any, x: torch.Tensor, dy: torch.Tensor) -> dict[str, Any]:
    """Everything that one forward and backward leaves behind."""
    call = case.call(layer)
    weight = call.get("weight", layer.weight)
    x = x.to(weight.dtype).clone().requires_grad_(not case.frozen_input)
    y, bias = layer(x, **call)
    if y.requires_grad:
        y.backward(dy.to(y.dtype) if dy.shape == y.shape else torch.ones_like(y))
    left = {"y": y.detach(), "dx": x.grad, "dw": weight.grad, "bias": bias}
    left["db"] = None if layer.bias is None else layer.bias.grad
    left["main_grad"] = getattr(weight, "main_grad", None)
    return left


def share(whole: torch.Tensor, axis: int) -> torch.Tensor:
    return whole.chunk(dist.get_world_size(), axis)[dist.get_rank()].contiguous()


def relative_error(got: torch.Tensor, reference: torch.Tensor) -> float:
    return float((got.double() - reference.double()).norm() / reference.double().norm())


ALL = {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "output_layer"}


def ours(model: torch.nn.Module) -> set[str]:
    """The last names of the linear layers that are ours."""
    flux = (FluxColumnParallelLinear, FluxRowParallelLinear)
    return {n.split(".")[-1] for n, m in model.named_modules() if isinstance(m, flux)}


def with_ours(way: str, build: Callable[[], Any], **options: Any) -> Any:
    """A model with our layers, by `enable` or by `replace`."""
    if way == "enable":
        flux_megatron.enable(**options)
    model = build()
    if way == "replace":
        flux_megatron.replace(model, **options)
    return model


def one_step(model: Any, tokens: torch.Tensor | None = None) -> list[torch.Tensor]:
    """The loss of a model with a few words, and its gradients."""
    tokens = torch.arange(8)[None] if tokens is None else tokens
    model.zero_grad()
    loss = model(tokens, torch.arange(tokens.shape[1])[None], None, labels=tokens).mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def overlapped() -> int:
    """How many calls there were: some, and all of them overlapped."""
    report = flux_megatron.report()
    assert report.overlapped == report.total > 0, report
    return report.total


def assert_same(got: Any, expected: Any) -> None:
    """Of tensors, in containers too, every bit; None is None."""
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def saved_sizes(forward: Callable[[], Any]) -> list[int]:
    """Elements of every tensor that is kept for backward, the smallest first."""
    sizes: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sorted(sizes)


# Parts of layer specifications: a ModuleSpec, or from 0.17 on a partial in its place.


def submodules_of(part: Any) -> Any:
    return part.keywords["submodules"] if isinstance(part, functools.partial) else part.submodules


def module_of(part: Any) -> Any:
    if not isinstance(part, functools.partial):
        return part.module
    return getattr(part.func, "__self__", part.func)  # a class or a method of it that builds one


def skip_where_mtp_needs_te(config: dict[str, Any]) -> None:
    """Main d98e8a64 asks for instances of a class that is a stand-in then, of stock layers too."""
    asks = hasattr(multi_token_prediction, "is_inference_column_parallel_linear")
    if config.get("mtp_num_layers") and asks and not transformer_engine.HAVE_TE:
        pytest.skip("this megatron-core builds multi-token prediction with TransformerEngine alone")


def skip_before(version: str, reason: str) -> None:
    """Where stock layers cannot do it."""
    if not MEGATRON_CORE.since(version):
        pytest.skip(f"stock layers before {version}: {reason}")

"""`--cuda-graph-impl local`: Megatron's own graphs of whole layers, with ours in.

On CPU a stand-in for a graph calls again what was captured, and leaves alone what a replay does:
marks on parameters, and all that is no tensor of the graph. So it shows what Megatron and we do
around graphs, exactly. What a graph holds is shown on GPUs (`test_graphs`, `test_expert_graphs`).
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import side_by_side as sbs
import te_stand_ins as te
import test_experts
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import cuda_graphs
from ranks import FUSED, on_cpu_ranks
from test_te_graphs import SEQUENCE, of_te, step
from torch.utils._pytree import tree_map

import flux_megatron
from flux_megatron.expert_parallel import once
from flux_megatron.integration import local_graphs
from flux_megatron.versions.megatron_core import MEGATRON_CORE

pytestmark = pytest.mark.skipif(
    not MEGATRON_CORE.since("0.16") or MEGATRON_CORE.since("0.19"),
    reason="before 0.16 and from 0.19 on graphs are made in other ways",
)
COUNTED = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}  # fmt: skip
CASES = {
    "ours": (test_experts.ours, test_experts.CASES["two a token"]),
    "ours, counted": (test_experts.ours, COUNTED),
    "Megatron's": (sbs.splits_as_lists, test_experts.CASES["two a token"]),
}
LOCAL = {"cuda_graph_impl": "local", "cuda_graph_warmup_steps": 1}
Runner = cuda_graphs._CudaGraphRunner


class Graph:
    """`replay` is what a runner gives it when it has captured."""

    def register_generator_state(self, state: Any) -> None: ...


def forward_again(runner: Any) -> None:
    """Of the memory that the graph reads, whatever has been written there since."""
    aliases: dict[int, torch.Tensor] = {}

    def alias(one: Any) -> Any:
        if not isinstance(one, torch.Tensor):
            return one
        return aliases.setdefault(id(one), one.data.requires_grad_(one.requires_grad))

    args, named = tree_map(alias, (runner.fwd_graph_input_args, runner.fwd_graph_input_kwargs))
    with torch.enable_grad():
        out = runner.func(*args, **named)
    runner.made = runner.get_tensors(out if isinstance(out, tuple) else (out,))
    runner.read = [aliases.get(id(one), one) for one in runner.fwd_graph_input_surface]
    for static, new in zip(runner.fwd_graph_output_surface, runner.made, strict=True):
        static.data.copy_(new)


def backward_again(runner: Any) -> None:
    parameters = [one for one in runner.params_to_backprop if hasattr(one, "main_grad")]
    marks = [one.grad_added_to_main_grad for one in parameters]
    found = torch.autograd.grad(
        [one for one in runner.made if one.requires_grad],
        [one for one in runner.read if one.requires_grad],
        [one for one in runner.static_grad_outputs if one is not None],
    )
    static = [one for one in runner.static_grad_inputs if one is not None]
    for one, new in zip(static, found, strict=True):
        one.data.copy_(new)
    for one, mark in zip(parameters, marks, strict=True):
        one.grad_added_to_main_grad = mark


def captured(create: Any, graph: str, again: Any) -> Any:
    @functools.wraps(create)
    def creating(runner: Any, *given: Any, **named: Any) -> None:
        create(runner, *given, **named)
        getattr(runner, graph).replay = functools.partial(again, runner)

    return creating


def stand_ins() -> Any:
    """For what a machine without a GPU has not."""
    made = {
        "CUDAGraph": Graph, "graph": lambda *_, **__: nullcontext(),
        "memory_stats": lambda: defaultdict(int), "empty_cache": lambda: None,
        "graph_pool_handle": lambda: None, "set_stream": lambda stream: None,
        "default_stream": lambda: None, "device_count": lambda: 0,
        "get_device_capability": lambda *_: (10, 0),
    }  # fmt: skip
    return mock.patch.multiple(torch.cuda, **made)


def build(graphs: bool, **more: Any) -> Any:
    local = LOCAL if graphs else {}
    model = test_experts.build(SEQUENCE, gradient_accumulation_fusion=True, **more, **local)
    return DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)


@contextlib.contextmanager
def graphs_of_megatron() -> Any:
    """Made anew, by the stand-in."""
    again = {"fwd": forward_again, "bwd": backward_again}
    with contextlib.ExitStack() as stack:
        local_graphs.mend(stack)
        made = {
            f"create_{way}_graph":
                captured(getattr(Runner, f"create_{way}_graph"), f"{way}_graph", function)
            for way, function in again.items()
        }  # fmt: skip
        enter = stack.enter_context
        enter(stand_ins())
        enter(mock.patch.multiple(Runner, **made))
        enter(mock.patch.object(cuda_graphs._CudagraphGlobalRecord, "cudagraph_created", False))
        enter(mock.patch.object(cuda_graphs, "get_all_rng_states", dict))
        enter(mock.patch.object(cuda_graphs, "get_cuda_rng_tracker", mock.MagicMock))
        yield


def compare(built: Callable[[bool], Any]) -> dict[tuple[str, str], int]:
    """Gradients of captured and of eager layers, and what their routers count; calls of ours."""
    sbs.give_stock_a_wgrad_kernel()
    flux_megatron.reset_report()
    with graphs_of_megatron():
        eager, model = built(False), built(True)
        seen = [(step(model, 0), step(eager, 0))]
        cuda_graphs.create_cudagraphs()
        seen += [(step(model, seed), step(eager, seed)) for seed in (1, 2)]
    for number, (got, expected) in enumerate(seen):
        names = ["loss", "loss", *(name for name, _ in model.named_parameters())]
        for word, one, other in zip(names, got, expected, strict=True):
            assert sbs.relative_error(one, other) == 0, f"{word} of step {number}"
    counted = model.module.named_buffers(), eager.module.buffers()
    for (word, one), other in zip(*counted, strict=True):
        assert torch.equal(one, other), word
    return flux_megatron.report().calls


def of_experts(name: str) -> dict[tuple[str, str], int]:
    sbs.start(1, expert_model_parallel_size=2)
    experts, more = CASES[name]
    with experts():
        calls = compare(functools.partial(build, **more))
    parallel_state.destroy_model_parallel()
    return calls


@pytest.mark.parametrize("name", CASES)
@on_cpu_ranks(2, environment=FUSED)
def test_whole_layers(rank, name):
    calls = of_experts(name)
    ours = {("a2a_gemm", "fused"), ("gemm_a2a", "fused")}
    assert calls.keys() == (set() if name == "Megatron's" else ours)


@on_cpu_ranks(2, environment=FUSED | {"FLUX_MEGATRON_EXPERTS_ONCE": "1"})
def test_tokens_that_travel_once(rank):
    with mock.patch.object(once, "route", wraps=once.route) as route:
        assert not of_experts("ours")  # by expert
    assert route.called


@sbs.on_tp_ranks(2, environment=FUSED)
def test_dense_layers(rank):
    te.pretend_te()
    assert te.overlap()
    compare(lambda graphs: of_te(32, LOCAL if graphs else {}, embedding=torch.bfloat16))
    sbs.overlapped()

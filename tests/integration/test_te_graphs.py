"""`--cuda-graph-impl transformer_engine`: Megatron's helper captures layers with our linears in.

On CPU `make_graphed_callables` is a stand-in, which calls again what was captured: that shows what
Megatron and we do around it. Warm-up, static inputs, gradients by `torch.autograd.grad` and what a
replay leaves alone, such as marks on parameters, are as in TransformerEngine 2.11. What a graph
holds is shown on two GPUs with TransformerEngine alone.
"""

from __future__ import annotations

import sys
import types
from contextlib import nullcontext
from typing import Any

import pytest
import side_by_side as sbs
import te_stand_ins as te
import test_experts
import torch
from megatron.core import num_microbatches_calculator, parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.extensions import transformer_engine
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.transformer_layer import TransformerLayer
from ranks import DEVICE, FUSED, on_cpu_ranks, on_device_ranks

import flux_megatron
from flux_megatron.versions.megatron_core import MEGATRON_CORE

SCOPES = pytest.mark.parametrize("scope", ["full", "attn", "mlp"])
BEFORE_EXPERTS = ["attn,moe_router", "attn,moe_router,moe_preprocess"]  # which stay eager
TWO_A_TOKEN = test_experts.CASES["two a token"]
SEQUENCE, BATCH, VOCAB = 256 if torch.cuda.is_available() else 16, 2, 64
# Of gradients in bf16: what is captured rounds otherwise than eager layers, in stock ones too, by
# up to 6e-3 on CPU. A micro-batch that is missing or counted twice is more than 0.3.
BOUND = 2e-2


def install_graphs() -> None:
    for name in ("transformer_engine", "transformer_engine.pytorch"):  # asked for at each replay
        sys.modules[name] = types.ModuleType(name)
    sys.modules["transformer_engine"].pytorch = sys.modules["transformer_engine.pytorch"]
    cuda_graphs.HAVE_TE_GRAPHS = True
    cuda_graphs.make_graphed_callables = make_graphed_callables
    of_layer = TransformerLayer.get_layer_static_inputs  # in bf16, but these models' are fp32

    def in_fp32(layer: TransformerLayer, *sizes: int) -> dict[str, torch.Tensor]:
        found = of_layer(layer, *sizes)
        found["hidden_states"] = found["hidden_states"].detach().float().requires_grad_()
        return found

    TransformerLayer.get_layer_static_inputs = in_fp32


def make_graphed_callables(
    layers: tuple[torch.nn.Module, ...], sample_args: list[Any], *, sample_kwargs: list[Any],
    num_warmup_iters: int, allow_unused_input: bool, _order: list[int], **_: Any,
) -> tuple[Any, ...]:  # fmt: skip
    assert _order == [1, -1]
    made = []
    for layer, args, kwargs in zip(layers, sample_args, sample_kwargs, strict=True):
        hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks)
        assert not any(hooks)
        static = [*args, *kwargs.values()]
        inputs = [one for one in (*static, *layer.parameters()) if one.requires_grad]
        for _ in range(num_warmup_iters):
            outputs = [one for one in layer(*args, **kwargs) if one.requires_grad]
            dy = [torch.empty_like(one) for one in outputs]
            found = torch.autograd.grad(outputs, inputs, dy, allow_unused=allow_unused_input)
            inputs = [one for one, grad in zip(inputs, found, strict=True) if grad is not None]
        made.append(_graphed(layer, args, kwargs, inputs))
    return tuple(made)


def _graphed(layer: torch.nn.Module, args: Any, kwargs: Any, inputs: list[torch.Tensor]) -> Any:
    static, names = [*args, *kwargs.values()], [*kwargs]
    parameters = [one for one in inputs if isinstance(one, torch.nn.Parameter)]
    capture = layer._te_cuda_graph_capture

    class Graphed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            with torch.no_grad():
                for one, new in zip(static, given, strict=False):
                    one.copy_(new)
            cuda_graphs._set_capture_start()  # what is called again ends where the capture did
            with torch.enable_grad():
                ctx.outputs = capture(*args, **kwargs)
            cuda_graphs._set_capture_end()
            return tuple(one.detach() for one in ctx.outputs)

        @staticmethod
        def backward(ctx: Any, *dy: torch.Tensor) -> tuple[Any, ...]:
            marks = [getattr(one, "grad_added_to_main_grad", None) for one in parameters]
            made = [(one, d) for one, d in zip(ctx.outputs, dy, strict=True) if one.requires_grad]
            outputs, dys = zip(*made, strict=True)
            found = dict(zip(inputs, torch.autograd.grad(outputs, inputs, dys), strict=True))
            for one, mark in zip(parameters, marks, strict=True):
                if mark is not None:
                    one.grad_added_to_main_grad = mark
            return tuple(found.get(one) for one in (*static, *parameters))

    def forward(*given: torch.Tensor, **named: Any) -> tuple[torch.Tensor, ...]:
        return Graphed.apply(*given, *(named[name] for name in names), *parameters)

    return forward


def build(hidden: int, graphs: bool, scope: str) -> Any:
    by_te = {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": scope}
    return of_te(hidden, by_te if graphs else {})


def of_te(hidden: int, more: dict[str, Any], embedding: torch.dtype | None = None) -> Any:
    """A model of TransformerEngine's layers, of the same weights each time. Its embedding gives
    fp32, because positions are, or what is said.
    """
    on_gpus = torch.cuda.is_available()  # where graphs register the states of TE's random numbers
    tensor_parallel.model_parallel_cuda_manual_seed(7, te_rng_tracker=on_gpus, force_reset_rng=True)
    torch.manual_seed(7)
    config = sbs.settings(
        2, True, torch.bfloat16,
        **{"num_layers": 2, "hidden_size": hidden, "ffn_hidden_size": 2 * hidden,
           "gradient_accumulation_fusion": True, **more},
    )  # fmt: skip
    spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    model = GPTModel(config, spec, VOCAB, SEQUENCE)
    model.to(DEVICE)
    model.embedding.to(embedding)
    # As Megatron's training does: no hook of gradients is of a stream that a capture waits for.
    with torch.cuda.stream(torch.cuda.Stream()) if on_gpus else nullcontext():
        made = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    if on_gpus:
        torch.cuda.synchronize()
    return made


def step(model: Any, seed: int) -> list[torch.Tensor]:
    """The loss of two micro-batches, and all gradients: those of both."""
    model.zero_grad_buffer()
    generator = torch.Generator().manual_seed(seed)
    mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool), 1)
    positions = torch.arange(SEQUENCE)[None]
    losses = []
    for _ in range(2):
        tokens, labels = torch.randint(0, VOCAB, (2, BATCH, SEQUENCE), generator=generator)
        given = (one.to(DEVICE) for one in (tokens, positions, mask))
        loss = model(*given, labels=labels.to(DEVICE)).mean()
        loss.backward()
        losses.append(loss.detach().clone())
    return [*losses, *(parameter.main_grad.clone() for parameter in model.parameters())]


def compare(eager: Any, model: Any, bound: float = 0.0) -> None:
    """Steps of eager layers and of captured ones, before the capture and behind it."""
    replicas = parallel_state.get_data_parallel_world_size()
    num_microbatches_calculator.unset_num_microbatches_calculator()
    num_microbatches_calculator.init_num_microbatches_calculator(
        0, None, 2 * BATCH * replicas, BATCH, replicas
    )
    seen = [(step(model, 0), step(eager, 0))]
    helper = cuda_graphs.TECudaGraphHelper([model], model.config, SEQUENCE, BATCH)
    helper.create_cudagraphs()
    assert all(layer.cuda_graphs for layer in model.module.decoder.layers)
    seen += [(step(model, seed), step(eager, seed)) for seed in (1, 2, 3)]
    for number, (got, expected) in enumerate(seen):
        for one, other in zip(got, expected, strict=True):
            assert sbs.relative_error(one, other) <= bound, number


@pytest.mark.skipif(not MEGATRON_CORE.since("0.16"), reason="before 0.16 scopes have other names")
@SCOPES
@sbs.on_tp_ranks(2, environment=FUSED)
def test_helper_and_layers_fit_together(rank, scope):
    te.pretend_te()
    install_graphs()
    assert te.overlap()
    flux_megatron.reset_report()
    compare(*(build(32, graphs, scope) for graphs in (False, True)), bound=BOUND)
    sbs.overlapped()


@pytest.mark.skipif(not MEGATRON_CORE.since("0.16"), reason="before 0.16 scopes have other names")
@pytest.mark.parametrize("scope", BEFORE_EXPERTS)
@on_cpu_ranks(2, environment=FUSED)
def test_our_experts_follow_a_graph(rank, scope):
    """What is captured sorts the rows for them and counts these."""
    sbs.start(1, expert_model_parallel_size=2)
    te.pretend_te()
    install_graphs()
    flux_megatron.reset_report()
    by_te = {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": scope}
    with test_experts.ours():
        made = (test_experts.build(SEQUENCE, **TWO_A_TOKEN, **more) for more in ({}, by_te))
        config = DistributedDataParallelConfig()
        compare(*(DistributedDataParallel(model.config, config, model) for model in made))
    calls = flux_megatron.report().calls
    assert calls.keys() == {("a2a_gemm", "fused"), ("gemm_a2a", "fused")}
    parallel_state.destroy_model_parallel()


@pytest.mark.skipif(
    not torch.cuda.is_available() or not transformer_engine.HAVE_TE,
    reason="needs GPUs and TransformerEngine",
)
@SCOPES
@on_device_ranks(2, environment={"FLUX_MEGATRON_STRATEGY": "hopper"}, fresh=True)
def test_captured_layers_do_what_eager_ones_do(rank, scope):
    from flux_megatron.integration.flags import FluxOptions
    from flux_megatron.integration.install import install

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    install(FluxOptions(), of_te=True)
    compare(*(build(1024, graphs, scope) for graphs in (False, True)), bound=BOUND)
    sbs.overlapped()

"""What one option changes: what is saved, logged, refused or left to megatron-core."""

from __future__ import annotations

import types

import pytest
import side_by_side as sbs
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers as stock
from side_by_side import Case

import flux_megatron
from flux_megatron import errors, settings

KINDS = ["column", "row"]


def layer_of(kind: str, sp: bool = True, prepare=None, config=None, **options):
    case = Case(kind, options, config or {}, prepare or (lambda layer: None))
    tp = dist.get_world_size()
    layer = sbs.build(case, True, sbs.settings(tp, sp, torch.float32, **case.config))
    x, dy = (t.float() for t in sbs.operands(case, sp))
    return layer, x.requires_grad_(), dy


@sbs.on_tp_ranks(2)
def test_gathered_input_is_kept_on_request(rank):
    layer, x, _ = layer_of("column", bias=False)
    layer.save_gathered = True
    assert sbs.saved_sizes(lambda: layer(x)) == sorted([2 * x.numel(), layer.weight.numel()])


@pytest.mark.parametrize("sp", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@sbs.on_tp_ranks(2)
def test_what_is_saved_can_be_offloaded(rank, kind, sp):
    """TransformerEngine's hooks offload what has an attribute, older ones, or is no parameter."""
    layer, x, _ = layer_of(kind, sp, bias=False)
    x.activation_offloading = True  # by megatron-core, in the layer's own forward for "row"
    if kind == "row" and sp:
        del x.activation_offloading
        layer.config._cpu_offloading_context = types.SimpleNamespace(inside_context=True)
        layer.config.cpu_offloading_activations = True
    saved = []

    def pack(tensor):
        offloads = getattr(tensor, "activation_offloading", False)
        saved.append((tensor.shape, offloads, isinstance(tensor, torch.nn.Parameter)))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    assert (x.shape, True, False) in saved
    assert (layer.weight.shape, False, True) in saved
    assert len(saved) == 2


@sbs.on_tp_ranks(2)
def test_bias_beside_a_frozen_weight_learns(rank):
    """Stock gives it no gradient."""
    for kind in KINDS:
        layer, x, dy = layer_of(kind, prepare=lambda layer: layer.weight.requires_grad_(False))
        layer(x)[0].backward(dy)
        assert torch.allclose(layer.bias.grad, dy.sum((0, 1)))
        assert layer.weight.grad is None


@sbs.on_tp_ranks(
    2, environment={"FLUX_MEGATRON_STRICT": "1", "FLUX_MEGATRON_STRATEGY": "pipelined"}
)
def test_strict_mode_refuses_to_run_without_overlap(rank):
    assert settings.get().strict
    for kind in KINDS:
        for sp in (True, False):
            layer, x, dy = layer_of(kind, sp)
            layer(x)[0].backward(dy)
        with pytest.raises(errors.FallbackRefused, match="9 rows cannot be divided"):
            layer(x[:3])[0].backward(dy[:3])
        layer, x, dy = layer_of(kind, sp=True, is_expert=True, skip_bias_add=True)
        layer(x)  # communicates nothing, so nothing falls back


@pytest.mark.parametrize("sp", [True, False])
@pytest.mark.parametrize("why", ["autocast", "a newer option"])
@pytest.mark.parametrize("kind", KINDS)
@sbs.on_tp_ranks(2)
def test_left_to_megatron_with_a_reason(rank, kind, why, sp):
    fused = {"gradient_accumulation_fusion": True}
    ours, x, dy = layer_of(kind, sp, config=fused)
    theirs = sbs.build(Case(kind), False, sbs.settings(2, sp, torch.float32))
    flux_megatron.reset_report()
    results = []
    for layer in (theirs, ours):
        x.grad = None
        if why == "a newer option" and layer is ours:
            _pass_newer_option(layer)
        with torch.autocast("cpu", torch.bfloat16, enabled=why == "autocast"):
            y = layer(x)[0]
        if why != "autocast":  # megatron-core's backward knows that of CUDA only
            y.backward(dy)
        results.append((y, x.grad, layer.weight.grad, layer.bias.grad))
    sbs.assert_same(*results)
    reasons = {"autocast": "autocast", "a newer option": "gtp_remat_size=2"}
    ((pattern, reason),) = flux_megatron.report().fallbacks
    with_sp = "ag_gemm" if kind == "column" else "gemm_rs"
    assert pattern == (with_sp if sp else "gemm_ar")
    assert reasons[why] in reason
    assert not flux_megatron.report().overlapped


def _pass_newer_option(layer) -> None:
    """As later versions do: an attribute, and one more argument around the GEMM."""
    layer.gtp_remat_size = 2
    ours, theirs = type(layer)._forward_impl, stock.ColumnParallelLinear._forward_impl
    layer._forward_impl = lambda **kwargs: ours(layer, **{**kwargs, "gtp_remat_size": 2})

    def without(self, *args, gtp_remat_size=1, **kwargs):
        return theirs(self, *args, **kwargs)

    for kind in (stock.ColumnParallelLinear, stock.RowParallelLinear):
        kind._forward_impl = without


@sbs.on_tp_ranks(2)
def test_bad_input_is_reported_on_every_rank(rank):
    column, x, _ = layer_of("column")
    row, x_row, _ = layer_of("row")
    passed, _, _ = layer_of("column", skip_weight_param_allocation=True)
    refused = [
        (ValueError, "equal K expected", lambda: column(x[..., :-1])),
        (ValueError, "equal K expected", lambda: row(x_row[..., :-1])),
        (ValueError, "one floating-point dtype", lambda: column(x.bfloat16())),
        (ValueError, "divisible by the group's 2 ranks", lambda: row(x_row[:3])),
        (RuntimeError, "weight was not supplied", lambda: passed(x)),
        (RuntimeError, "supplied weight's shape", lambda: passed(x, torch.zeros(2, 2))),
        (RuntimeError, "input_is_parallel", lambda: layer_of("row", input_is_parallel=False)),
    ]
    for error, message, call in refused:
        with pytest.raises(error, match=message):
            call()
    column(x)  # and the layers still work


@sbs.on_tp_ranks(1)
def test_constructor_leaves_the_config_as_it_was(rank):
    config = sbs.settings(1, False, torch.float32, gradient_accumulation_fusion=True)
    with pytest.raises(RuntimeError, match="fused_weight_gradient_mlp_cuda"):
        sbs.build(Case("column"), False, config)
    layer = sbs.build(Case("column"), True, config)
    assert layer.config is config
    assert config.gradient_accumulation_fusion
    assert layer.gradient_accumulation_fusion


@sbs.on_tp_ranks(2)
def test_a_weight_used_twice_goes_to_the_main_grad_of_each_use(rank):
    for kind in KINDS:
        layer, x, dy = layer_of(kind, config={"gradient_accumulation_fusion": True})
        grads = [torch.zeros_like(layer.weight) for _ in range(2)]
        outputs = []
        for scale, main_grad in zip((1, 3), grads, strict=True):
            layer.weight.main_grad = main_grad
            outputs.append(layer(x * scale)[0])
        outputs[0].backward(dy)
        outputs[1].backward(dy)
        assert grads[0].any()
        assert sbs.relative_error(3 * grads[0], grads[1]) < 1e-6

"""Weight gradients that are computed later: that of the LM head when the pipeline drains."""

from __future__ import annotations

from unittest import mock

import pytest
import side_by_side as sbs
import torch
from megatron.core.utils import drain_embedding_wgrad_compute
from side_by_side import Case

import flux_megatron
from flux_megatron.integration import arm
from flux_megatron.integration.apex_shim import provide_wgrad_kernels
from flux_megatron.integration.delayed_wgrad import DelayedWgrad


def settings(sp: bool = True, **more):
    return sbs.settings(
        2, sp, torch.float32, gradient_accumulation_fusion=True, num_layers=2,
        defer_embedding_wgrad_compute=True, pipeline_model_parallel_size=2, **more,
    )  # fmt: skip


@pytest.mark.parametrize("sp", [True, False])
@pytest.mark.parametrize("limit", [0, 1, 3])
@sbs.on_tp_ranks(2)
def test_deferred_weight_gradient(rank, limit, sp):
    """Two microbatches; Megatron computes what was deferred, and all arrives in main_grad."""
    provide_wgrad_kernels()
    main_grads = []
    for ours in (False, True):
        inputs, outputs = [], []
        case = Case(
            "column",
            {"embedding_activation_buffer": inputs, "grad_output_buffer": outputs, "bias": False},
        )
        config = settings(sp, wgrad_deferral_limit=limit)
        layer = sbs.build(case, ours, config)
        layer.weight.main_grad = torch.zeros_like(layer.weight)
        layer.weight.grad_added_to_main_grad = False
        x, dy = (t.float() for t in sbs.operands(case, sp))
        for scale in (1.0, 2.0):
            layer(x.clone().requires_grad_() * scale)[0].backward(dy)
        deferred = min(2, limit) if limit else 2
        assert (len(inputs), len(outputs)) == (deferred, deferred)
        assert all(kept.shape == dy.shape and torch.equal(kept, dy) for kept in outputs)
        assert layer.weight.grad_added_to_main_grad
        assert layer.weight.grad.shape == layer.weight.shape
        assert (deferred == 2) == (not layer.weight.main_grad.any())
        if deferred == 2:  # Megatron's own cannot drain a single one
            drain_embedding_wgrad_compute(config, inputs, outputs, layer.weight, layer.tp_group)
        main_grads.append(layer.weight.main_grad)
    assert sbs.relative_error(main_grads[1], main_grads[0]) < 1e-6


@sbs.on_tp_ranks(2)
def test_main_grad_is_the_one_of_the_forward(rank):
    """Between its forward and its backward a tied weight gets another main_grad."""
    provide_wgrad_kernels()
    buffers = {"embedding_activation_buffer": [], "grad_output_buffer": []}
    case = Case("column", {**buffers, "bias": False})
    layer = sbs.build(case, True, settings())
    layer.weight.grad_added_to_main_grad = False
    first = layer.weight.main_grad = torch.zeros_like(layer.weight)
    x, dy = (t.float() for t in sbs.operands(case, True))
    y, _ = layer(x.requires_grad_())
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    y.backward(dy)
    assert layer.weight.main_grad is first


@sbs.on_tp_ranks(2)
def test_what_cannot_be_deferred_is_refused(rank):
    config = settings()
    case = Case("column", {"embedding_activation_buffer": [], "grad_output_buffer": []})
    with pytest.raises(RuntimeError, match=r"install apex, or call .*provide_wgrad_kernels"):
        sbs.build(case, True, config)
    provide_wgrad_kernels()
    layer = sbs.build(case, True, config)
    layer.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="a frozen weight given, but its gradient is deferred"):
        layer(sbs.operands(case, True)[0].float())


# --delay-wgrad-compute: backward leaves the gradient, `backward_dw` computes it


def delaying(sp: bool, fusion: bool, delayed: bool):
    config = sbs.settings(2, sp, torch.float32, gradient_accumulation_fusion=fusion)
    config.delay_wgrad_compute = delayed  # behind checks of what stands around the layers
    return config


def built(case: Case, ours: bool, config):
    """As one of TransformerEngine's layers, which alone delay in stock."""
    with mock.patch.object(DelayedWgrad, "delays", True):
        layer = sbs.build(case, ours, config)
    if config.gradient_accumulation_fusion:
        layer.weight.main_grad = torch.zeros_like(layer.weight)
        layer.weight.grad_added_to_main_grad = False
    return layer


def gradient(layer) -> torch.Tensor:
    return layer.weight.main_grad if layer.gradient_accumulation_fusion else layer.weight.grad


def both_microbatches(case: Case, layer, sp: bool) -> list[torch.Tensor]:
    """dx of two that are in flight together."""
    x, dy = (t.float() for t in sbs.operands(case, sp))
    inputs = [(x * scale).requires_grad_() for scale in (1, 2)]
    outputs = [layer(each)[0] for each in inputs]
    for output in outputs:
        output.backward(dy)
    return [each.grad for each in inputs]


@pytest.mark.parametrize("save_gathered", [False, True])
@pytest.mark.parametrize("fusion", [False, True])
@pytest.mark.parametrize("sp", [True, False])
@pytest.mark.parametrize("kind", ["column", "row"])
@sbs.on_tp_ranks(2)
def test_backward_dw_adds_what_stock_s_backward_does(rank, kind, sp, fusion, save_gathered):
    """Other calls overwrite the shared buffers in between."""
    provide_wgrad_kernels()
    case = Case(kind, {"bias": kind == "column"})
    stock, layer, other = (
        built(case, ours, delaying(sp, fusion, delayed))
        for ours, delayed in ((False, False), (True, True), (True, False))
    )
    assert layer.weight.skip_backward_post_hook
    assert layer.need_backward_dw()
    layer.save_gathered = save_gathered
    hooked = []
    layer.register_wgrad_accumulation_and_reduce_hooks(
        lambda: hooked.append(gradient(layer).clone())
    )
    right, dx = (both_microbatches(case, each, sp) for each in (stock, layer))
    assert not hooked
    assert not layer.weight.main_grad.any() if fusion else layer.weight.grad is None
    torch.testing.assert_close(dx, right, rtol=1e-5, atol=1e-5)
    both_microbatches(case, other, sp)
    calls = flux_megatron.report().total
    layer.backward_dw()
    assert flux_megatron.report().total == calls, "communication was left to backward_dw"
    torch.testing.assert_close(gradient(layer), gradient(stock), rtol=1e-5, atol=1e-5)
    assert len(hooked) == 1
    assert torch.equal(hooked[0], gradient(layer))
    if kind == "column":
        torch.testing.assert_close(layer.bias.grad, stock.bias.grad, rtol=1e-5, atol=1e-5)
    layer.backward_dw()
    torch.testing.assert_close(gradient(layer), gradient(stock), rtol=1e-5, atol=1e-5)


@sbs.on_tp_ranks(2)
def test_what_nobody_asks_for_later_is_computed_at_once(rank):
    """By megatron-core's own layers, as an LM head; nothing for a frozen weight."""
    for kind in ("column", "row"):
        case = Case(kind, {"bias": False})
        layer = sbs.build(case, True, delaying(True, False, delayed=True))
        assert not layer.need_backward_dw()
        assert not hasattr(layer.weight, "skip_backward_post_hook")
        both_microbatches(case, layer, True)
        assert layer.weight.grad.any()
    frozen = built(Case("row"), True, delaying(True, False, delayed=True))
    frozen.weight.requires_grad_(False)
    both_microbatches(Case("row"), frozen, True)
    frozen.backward_dw()
    assert frozen.weight.grad is None


@sbs.on_tp_ranks(2)
def test_hooks_run_where_megatron_s_code_has_computed_it(rank):
    """In the stock arm of a comparison, which delays nothing."""
    layer = built(Case("row"), True, delaying(True, False, delayed=True))
    hooked = []
    layer.register_wgrad_accumulation_and_reduce_hooks(lambda: hooked.append(layer.weight.grad))
    with arm.use(stock=True):
        both_microbatches(Case("row"), layer, True)
    at_once = layer.weight.grad.clone()
    layer.backward_dw()
    (grad,) = hooked
    assert torch.equal(grad, at_once)

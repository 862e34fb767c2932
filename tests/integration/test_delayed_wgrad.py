"""`--delay-wgrad-compute`: backward leaves the weight's gradient, `backward_dw` computes it."""

from __future__ import annotations

import pytest
import side_by_side as sbs
import torch
from side_by_side import Case

import flux_megatron
from flux_megatron.integration import arm
from flux_megatron.integration.apex_shim import provide_wgrad_kernels


def settings(sp: bool, fusion: bool, delayed: bool, **more):
    config = sbs.settings(
        2, sp, torch.float32, gradient_accumulation_fusion=fusion, num_layers=2, **more
    )
    config.delay_wgrad_compute = delayed  # behind checks of what stands around the layers
    return config


def built(case: Case, ours: bool, config):
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
        built(case, ours, settings(sp, fusion, delayed=delayed))
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
    """The weight of an LM head; nothing for a frozen weight."""
    head = Case("column", {"bias": False, "skip_weight_param_allocation": False})
    layer = built(head, True, settings(True, False, delayed=True))
    assert not layer.need_backward_dw()
    assert not hasattr(layer.weight, "skip_backward_post_hook")
    both_microbatches(head, layer, True)
    assert layer.weight.grad.any()
    frozen = built(Case("row"), True, settings(True, False, delayed=True))
    frozen.weight.requires_grad_(False)
    both_microbatches(Case("row"), frozen, True)
    frozen.backward_dw()
    assert frozen.weight.grad is None


@sbs.on_tp_ranks(2)
def test_hooks_run_where_megatron_s_code_has_computed_it(rank):
    """In the stock arm of a comparison, which delays nothing."""
    layer = built(Case("row"), True, settings(True, False, delayed=True))
    hooked = []
    layer.register_wgrad_accumulation_and_reduce_hooks(lambda: hooked.append(layer.weight.grad))
    with arm.use(stock=True):
        both_microbatches(Case("row"), layer, True)
    at_once = layer.weight.grad.clone()
    layer.backward_dw()
    (grad,) = hooked
    assert torch.equal(grad, at_once)

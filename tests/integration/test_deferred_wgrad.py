"""The weight gradient of the LM head, deferred until the pipeline drains."""

from __future__ import annotations

import pytest
import side_by_side as sbs
import torch
from megatron.core.utils import drain_embedding_wgrad_compute
from side_by_side import Case

from flux_megatron.integration.apex_shim import provide_wgrad_kernels


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
        config = sbs.settings(
            2, sp, torch.float32, gradient_accumulation_fusion=True, num_layers=2,
            defer_embedding_wgrad_compute=True, wgrad_deferral_limit=limit,
            pipeline_model_parallel_size=2,
        )  # fmt: skip
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
    config = sbs.settings(
        2, True, torch.float32, gradient_accumulation_fusion=True, num_layers=2,
        defer_embedding_wgrad_compute=True, pipeline_model_parallel_size=2,
    )  # fmt: skip
    layer = sbs.build(case, True, config)
    layer.weight.grad_added_to_main_grad = False
    first = layer.weight.main_grad = torch.zeros_like(layer.weight)
    x, dy = (t.float() for t in sbs.operands(case, True))
    y, _ = layer(x.requires_grad_())
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    y.backward(dy)
    assert layer.weight.main_grad is first


@sbs.on_tp_ranks(2)
def test_what_cannot_be_deferred_is_refused(rank):
    config = sbs.settings(
        2, True, torch.float32, gradient_accumulation_fusion=True, num_layers=2,
        defer_embedding_wgrad_compute=True, pipeline_model_parallel_size=2,
    )  # fmt: skip
    case = Case("column", {"embedding_activation_buffer": [], "grad_output_buffer": []})
    with pytest.raises(RuntimeError, match=r"install apex, or call .*provide_wgrad_kernels"):
        sbs.build(case, True, config)
    provide_wgrad_kernels()
    layer = sbs.build(case, True, config)
    layer.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="a frozen weight given, but its gradient is deferred"):
        layer(sbs.operands(case, True)[0].float())

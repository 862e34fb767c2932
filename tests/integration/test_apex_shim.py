"""The stand-in for apex's module: where megatron-core finds it, and what its layers make of it."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from unittest import mock

import pytest
import side_by_side as sbs
import torch
from megatron.core.tensor_parallel import layers as stock
from side_by_side import Case

from flux_megatron import wgrad
from flux_megatron.integration import apex_shim
from flux_megatron.integration.apex_shim import NAME, SHIM, provide_wgrad_kernels
from flux_megatron.lab import reference

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec(NAME) is not None, reason="apex itself is installed"
)


@contextlib.contextmanager
def withdrawn() -> Iterator[None]:
    """What is provided inside is withdrawn at the end."""
    with mock.patch.dict(vars(stock)):
        yield
    sys.modules.pop(NAME, None)


@pytest.fixture(autouse=True)
def _as_it_was():
    with withdrawn():
        yield
    wgrad._apex_kernels.cache_clear()


def test_it_is_found_wherever_megatron_looks():
    for _ in range(2):
        provide_wgrad_kernels()
        assert importlib.import_module(NAME) is SHIM
        assert importlib.util.find_spec(NAME) is not None
        assert stock._grad_accum_fusion_available
        assert stock.fused_weight_gradient_mlp_cuda is SHIM


def test_apex_goes_first(monkeypatch):
    apex = types.ModuleType(NAME)
    monkeypatch.setitem(sys.modules, NAME, apex)
    before = dict(vars(stock))
    provide_wgrad_kernels()
    assert sys.modules[NAME] is apex
    assert vars(stock) == before


@pytest.mark.parametrize("main_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_it_adds(main_dtype):
    """Small integers, exact in every dtype; x and dy of more dimensions than two."""
    random = torch.Generator().manual_seed(1)
    x, dy = (torch.randint(-2, 3, (4, 3, n), generator=random).bfloat16() for n in (5, 6))
    sums = torch.full((6, 5), 3.0, dtype=main_dtype)
    add = getattr(SHIM, f"wgrad_gemm_accum_fp{32 if main_dtype == torch.float32 else 16}")
    add(x, dy, sums)
    dw = reference.wgrad(dy.double().flatten(0, 1), x.double().flatten(0, 1))
    assert torch.equal(sums.double(), 3 + dw)


def test_our_layers_do_not_go_round_through_it(monkeypatch):
    """On a GPU ours look for apex and find the stand-in, which must not look again."""
    calls = []
    monkeypatch.setattr(
        apex_shim, "accumulate_wgrad_by_torch", lambda *given, **named: calls.append(given)
    )
    provide_wgrad_kernels()
    wgrad._apex_kernels.cache_clear()
    on_a_gpu = types.SimpleNamespace(is_cuda=True, dtype=torch.float32)
    wgrad.accumulate_wgrad(on_a_gpu, torch.ones(4, 3), torch.ones(4, 2))
    assert len(calls) == 1
    assert calls[0][0] is on_a_gpu


@pytest.mark.parametrize("main_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_beta_0_reads_nothing(main_dtype):
    x, dy = torch.ones(4, 3).bfloat16(), torch.ones(4, 2).bfloat16()
    main_grad = torch.full((2, 3), float("nan"), dtype=main_dtype)
    wgrad.accumulate_wgrad(main_grad, dy, x, beta=0)
    assert torch.equal(main_grad, torch.full((2, 3), 4.0, dtype=main_dtype))


@sbs.on_tp_ranks(2)
def test_stock_layers_fuse_without_apex(rank):
    """Two backwards: what is in main_grad is what autograd sums without fusion."""
    cases = [(kind, sp, main) for kind in ("column", "row") for sp in (True, False)
             for main in (torch.float32, torch.bfloat16)]  # fmt: skip
    for kind, sp, main_dtype in cases:
        case = Case(kind, {"skip_bias_add": True})
        x, dy = sbs.operands(case, sp)
        fused = sbs.settings(2, sp, torch.float32, gradient_accumulation_fusion=True)
        if kind == "column":
            with pytest.raises(RuntimeError, match="install APEX"):
                sbs.build(case, False, fused)
        with withdrawn():
            provide_wgrad_kernels()
            layer = sbs.build(case, False, fused)
            layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=main_dtype)
            for _ in range(2):
                layer(x.float().requires_grad_())[0].backward(dy.float())
        plain = sbs.build(case, False, sbs.settings(2, sp, torch.float32))
        for _ in range(2):
            plain(x.float().requires_grad_())[0].backward(dy.float())
        assert layer.weight.grad is None
        error = sbs.relative_error(layer.weight.main_grad, plain.weight.grad)
        assert error < (1e-6 if main_dtype == torch.float32 else 1e-2), (kind, sp, main_dtype)

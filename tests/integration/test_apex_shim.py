"""The stand-in for apex's module: where megatron-core finds it, and what its layers make of it."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import types
from typing import Any
from unittest import mock

import pytest
import side_by_side as sbs
import torch
from megatron.core.tensor_parallel import layers as stock
from ranks import on_cpu_ranks
from side_by_side import Case

from flux_megatron import wgrad
from flux_megatron.integration import apex_shim
from flux_megatron.integration.apex_shim import NAME, SHIM, provide_wgrad_kernels
from flux_megatron.lab import reference

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec(NAME) is not None, reason="apex itself is installed"
)


@on_cpu_ranks(1)
def test_it_is_found_wherever_megatron_looks(rank):
    for _ in range(2):
        provide_wgrad_kernels()
        assert importlib.import_module(NAME) is SHIM
        assert importlib.util.find_spec(NAME) is not None
        assert stock._grad_accum_fusion_available
        assert stock.fused_weight_gradient_mlp_cuda is SHIM


@on_cpu_ranks(1)
def test_apex_goes_first(rank):
    sys.modules[NAME] = apex = types.ModuleType(NAME)
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


@on_cpu_ranks(1)
def test_our_layers_do_not_go_round_through_it(rank):
    """On a GPU ours look for apex and find the stand-in, which must not look again."""
    provide_wgrad_kernels()
    wgrad._apex_kernels.cache_clear()
    on_a_gpu = types.SimpleNamespace(is_cuda=True, dtype=torch.float32)
    with mock.patch.object(apex_shim, "accumulate_wgrad_by_torch") as by_torch:
        wgrad.accumulate_wgrad(on_a_gpu, torch.ones(4, 3), torch.ones(4, 2))
    assert [call.args[0] for call in by_torch.call_args_list] == [on_a_gpu]


@pytest.mark.parametrize("main_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_beta_0_reads_nothing(main_dtype):
    x, dy = torch.ones(4, 3).bfloat16(), torch.ones(4, 2).bfloat16()
    main_grad = torch.full((2, 3), float("nan"), dtype=main_dtype)
    wgrad.accumulate_wgrad(main_grad, dy, x, beta=0)
    assert torch.equal(main_grad, torch.full((2, 3), 4.0, dtype=main_dtype))


@sbs.on_tp_ranks(2)
def test_stock_layers_fuse_without_apex(rank):
    """Two backwards: what is in main_grad is what autograd sums without fusion."""

    def learned(case: Case, config: Any, main_dtype: torch.dtype, sp: bool) -> Any:
        layer = sbs.build(case, False, config)
        layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=main_dtype)
        x, dy = (t.float() for t in sbs.operands(case, sp))
        for _ in range(2):
            layer(x.clone().requires_grad_())[0].backward(dy)
        return layer.weight

    fusion = {"gradient_accumulation_fusion": True}
    with pytest.raises(RuntimeError, match="install APEX"):
        sbs.build(Case("column"), False, sbs.settings(2, True, torch.float32, **fusion))
    provide_wgrad_kernels()
    dtypes = (torch.float32, torch.bfloat16)
    for kind, sp, main_dtype in itertools.product(("column", "row"), (True, False), dtypes):
        case = Case(kind, {"skip_bias_add": True})
        fused, plain = (
            learned(case, sbs.settings(2, sp, torch.float32, **more), main_dtype, sp)
            for more in (fusion, {})
        )
        assert fused.grad is None
        error = sbs.relative_error(fused.main_grad, plain.grad)
        assert error < (1e-6 if main_dtype == torch.float32 else 1e-2), (kind, sp, main_dtype)

"""Megatron's main_grad protocol: what is added where, and what autograd is given instead."""

from __future__ import annotations

import types

import pytest
import torch
from megatron.core.tensor_parallel import layers as stock

from flux_megatron import wgrad
from flux_megatron.integration import main_grad as subject
from flux_megatron.integration.main_grad import into_main_grad, wgrad_into_main_grad
from flux_megatron.lab import reference
from flux_megatron.wgrad import accumulate_wgrad

M, N, K = 12, 6, 5


def integers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small integers: every product and sum below is exact in bf16."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


def parameter(dtype: torch.dtype, main_dtype: torch.dtype, **tags) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.zeros(N, K, dtype=dtype))
    weight.main_grad = integers(N, K, dtype=main_dtype)
    for name, value in tags.items():
        setattr(weight, name, value)
    return weight


@pytest.mark.parametrize("main_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_product_is_added(dtype, main_dtype):
    weight = parameter(dtype, main_dtype)
    dy, x = integers(M, N, dtype=dtype), integers(M, K, dtype=dtype)
    wanted = weight.main_grad.double() + reference.wgrad(dy.double(), x.double())
    same = weight.main_grad
    assert wgrad_into_main_grad(weight, dy, x) is None
    assert weight.main_grad is same
    assert torch.equal(same.double(), wanted)


def test_bf16_products_are_summed_in_fp32():
    main_grad = torch.zeros(1, 1)
    ones = torch.ones(513, 1, dtype=torch.bfloat16)
    accumulate_wgrad(main_grad, ones, ones + 2**-7)
    assert main_grad.item() == 513 * (1 + 2**-7)  # 517.0078125: bf16 has steps of 4 there


@pytest.mark.gpu
def test_product_is_added_on_a_gpu_in_fp32():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        dy, x = (integers(64, n, dtype=dtype).cuda() for n in (48, 40))
        for beta, start in ((1, 3.0), (0, torch.nan)):
            main_grad = torch.full((48, 40), start, device="cuda")
            dw = reference.wgrad(dy.double(), x.double())
            accumulate_wgrad(main_grad, dy, x, beta=beta)
            assert torch.equal(main_grad.double(), beta * 3.0 + dw)


@pytest.mark.parametrize("zero", [True, False])
def test_autograd_gets_a_dummy_where_megatron_asks_for_one(zero):
    weight = parameter(
        torch.bfloat16, torch.float32, grad_added_to_main_grad=False, zero_out_wgrad=zero
    )
    dy, x = (integers(M, n, dtype=torch.bfloat16) for n in (N, K))
    dummy = wgrad_into_main_grad(weight, dy, x)
    assert weight.grad_added_to_main_grad is True
    assert (dummy.shape, dummy.dtype) == (weight.shape, torch.bfloat16)
    assert not (zero and dummy.any())


def test_parameter_of_fsdp_gets_the_product_alone():
    weight = parameter(torch.float32, torch.float32, __fsdp_param__=True)
    buffer = torch.full((N, K), torch.nan)
    weight.get_main_grad = lambda: buffer
    dy, x = integers(M, N), integers(M, K)
    wgrad_into_main_grad(weight, dy, x)
    assert weight.main_grad is buffer
    assert torch.equal(buffer, reference.wgrad(dy, x))


def test_main_grad_is_the_one_of_the_forward():
    weight = parameter(torch.float32, torch.float32)
    first = weight.main_grad
    wanted = first + reference.wgrad(integers(M, N), integers(M, K))
    add = into_main_grad(weight)
    weight.main_grad = torch.zeros(N, K)
    add(weight, integers(M, N), integers(M, K))
    assert weight.main_grad is first
    assert torch.equal(first, wanted)


@pytest.mark.parametrize(
    ("main_grad", "message"),
    [(None, "no main_grad"), (torch.zeros(N, K, dtype=torch.float64), "torch.float64")],
)
def test_refusals_say_why(main_grad, message):
    weight = parameter(torch.float32, torch.float32)
    weight.main_grad = main_grad
    with pytest.raises(RuntimeError, match=message):
        wgrad_into_main_grad(weight, integers(M, N), integers(M, K))


class OnTheGpu:
    """Stands for a main_grad on a GPU, as far as the choice of a kernel looks."""

    is_cuda, shape, device = True, torch.Size((N, K)), "cpu"

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


@pytest.mark.parametrize(
    ("dtype", "kernel"),
    [(torch.float32, "fp32"), (torch.bfloat16, "fp16"), (torch.float16, "fp16")],
)
def test_apex_kernel_is_taken_on_a_gpu(monkeypatch, dtype, kernel):
    """It only adds: with beta 0 main_grad is not read, whatever lies there."""
    calls, formed = [], []
    module = types.SimpleNamespace(
        wgrad_gemm_accum_fp32=lambda *args: calls.append(("fp32", *args)),
        wgrad_gemm_accum_fp16=lambda *args: calls.append(("fp16", *args)),
    )
    monkeypatch.setattr(wgrad, "_apex_kernels", lambda: module)
    by_torch = lambda *_, beta: formed.append(beta)  # noqa: E731
    monkeypatch.setattr(wgrad, "accumulate_wgrad_by_torch", by_torch)
    main_grad, dy, x = OnTheGpu(dtype), integers(M, N), integers(M, K)
    accumulate_wgrad(main_grad, dy, x)
    assert calls == [(kernel, x, dy, main_grad)]
    accumulate_wgrad(torch.zeros(N, K), dy, x)  # on the CPU it cannot run
    accumulate_wgrad(main_grad, dy, x, beta=0)
    assert (len(calls), formed) == (1, [1, 0])


def test_dummy_comes_from_transformer_engine_where_it_is(monkeypatch):
    asked = []
    monkeypatch.setattr(stock, "HAVE_TE", True)
    monkeypatch.setattr(
        stock, "get_dummy_wgrad", lambda *a, **k: asked.append((a, k)) or "dummy", raising=False
    )
    weight = types.SimpleNamespace(
        main_grad=OnTheGpu(torch.float32), grad_added_to_main_grad=False, zero_out_wgrad=True
    )
    assert subject.placeholder_gradient(weight, torch.bfloat16) == "dummy"
    assert asked == [(([N, K], torch.bfloat16), {"zero": True})]

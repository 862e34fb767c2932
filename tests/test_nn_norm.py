"""The norms beside torch's, against fp64; interpreted where there is no GPU."""

import pytest
import torch
from closeness import assert_as_close_as, assert_exact, largest_error
from ranks import DEVICE
from torch import Tensor

import flux_megatron
from flux_megatron import errors, ops, settings
from flux_megatron.kernels import norm as kernels
from flux_megatron.lab import reference
from flux_megatron.nn import norm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = ["layer_norm", "layer_norm without bias", "rms_norm"]
# one row; several blocks of narrow rows for each CTA; columns that fill no block; wide rows
SHAPES = [(1, 1), (3, 2, 24), (300, 100), (5, 1000), (2, 3, 8200)]
EPS = 1e-3


@pytest.fixture(autouse=True)
def _kernels_on_any_device(monkeypatch):
    """And whatever they do not write is NaN."""
    monkeypatch.setattr(norm, "INTERPRET", True)
    original = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor,
        "new_empty",
        lambda *given, **named: original(*given, **named).fill_(torch.nan),
    )


def operands(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """x with rows that are no zero in the mean, the parameters; dy."""
    random = torch.Generator().manual_seed(len(shape) * shape[-1])
    sizes = [shape, (*shape[:-1], 1), shape, *[shape[-1:]] * (2 if kind == "layer_norm" else 1)]
    x, mean, dy, *parameters = (torch.randn(size, generator=random) for size in sizes)
    return [t.to(DEVICE, dtype) for t in (3 * x + mean, *parameters)], dy.to(DEVICE, dtype)


def run(
    module, kind: str, leaves: list[Tensor], dy: Tensor, zero_centered: bool = False
) -> list[Tensor]:
    """y and the gradients of x, weight and bias."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    y = getattr(module, kind.split()[0])(*leaves, eps=EPS, zero_centered=zero_centered)
    y.backward(dy.to(y.dtype))
    return [y, *(leaf.grad for leaf in leaves)]


def by_torch(*args) -> list[Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "supports", lambda *given: "for comparison")
        patch.setattr(ops, "note_fallback", lambda *said: None)
        return run(norm, *args)


def check(
    kind: str, leaves: list[Tensor], dy: Tensor, zero_centered: bool = False, cancelled: float = 0.0
) -> list[Tensor]:
    """At most twice torch's error, or two roundings of the largest value: in a handful of numbers
    torch's own error is luck. Where dx is 0, of what was `cancelled`.
    """
    wide = [leaf.cpu().double() for leaf in leaves]
    ours = run(norm, kind, leaves, dy, zero_centered)
    theirs = by_torch(kind, leaves, dy, zero_centered)
    true = run(reference, kind, wide, dy.cpu().double(), zero_centered)
    for what, *three in zip(("y", "dx", "dweight", "dbias"), ours, theirs, true, strict=False):
        got, _, exact = three
        largest = exact.abs().max().item() or (cancelled if what == "dx" else 0.0)
        roundings = 2 * torch.finfo(got.dtype).eps * largest
        if not largest_error(got, exact) <= roundings:
            assert_as_close_as(*three, what)
    return ours


@pytest.mark.parametrize(
    ("dtype", "zero_centered"), [*((dtype, False) for dtype in DTYPES), (torch.bfloat16, True)]
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_as_close_to_the_reference_as_torch(kind, shape, dtype, zero_centered):
    leaves, dy = operands(kind, shape, dtype)
    # Of one column LayerNorm's dx is dy gamma / sqrt(eps) less itself: with a fused multiply-add
    # one of the two is not rounded.
    gamma = leaves[1] + 1.0 if zero_centered else leaves[1]
    cancelled = (dy * gamma).abs().max().item() / EPS**0.5 if shape[-1] == 1 else 0.0
    check(kind, leaves, dy, zero_centered, cancelled)


@pytest.mark.parametrize("kind", KINDS)
def test_residual_kept_in_fp32(kind):
    """bf16 parameters: so is y, and dx is fp32."""
    (x, *parameters), dy = operands(kind, (3, 5, 40), torch.bfloat16)
    found = check(kind, [x.float() + 2**-12, *parameters], dy)
    dtypes = [torch.bfloat16, torch.float32, *[torch.bfloat16] * len(parameters)]
    assert [one.dtype for one in found] == dtypes


def test_rows_are_taken_as_they_lie():
    """The keys in QKV, as a norm of queries and keys is given it."""
    (qkv, weight), _ = operands("rms_norm", (4, 2, 3 * 32), torch.bfloat16)
    keys = qkv[..., 32:64]
    assert norm._rows(keys).data_ptr() == keys.data_ptr()
    assert norm._rows(keys.mT).is_contiguous()
    whole, part = (t.detach().requires_grad_() for t in (keys.contiguous(), qkv))
    y = norm.rms_norm(part[..., 32:64], weight[32:64])
    y.backward(dy := torch.randn_like(y).mT.contiguous().mT)
    expected = norm.rms_norm(whole, weight[32:64])
    expected.backward(dy.contiguous())
    assert_exact(y, expected)
    assert_exact(part.grad[..., 32:64], whole.grad)


def test_the_same_bits_each_time():
    case = ("layer_norm", *operands("layer_norm", (300, 100), torch.float32))
    for first, second in zip(run(norm, *case), run(norm, *case), strict=True):
        assert_exact(first, second)


def test_parts_of_many_programs_are_summed():
    partials = torch.arange(2 * 70 * 100, device=DEVICE).view(2, 70, 100).float() % 5
    total = torch.empty(2, 100, dtype=torch.bfloat16, device=DEVICE)
    kernels.sum_partials(partials, total)
    assert_exact(total, partials.sum(1).bfloat16())


def test_caller_may_modify_the_result():
    (x, weight), _ = operands("rms_norm", (3, 2, 24), torch.float32)
    y = norm.rms_norm(x.requires_grad_(), weight)
    y.mul_(2).sum().backward()
    assert y._base is None


def test_no_rows():
    y, dx, *gradients = run(norm, "layer_norm", *operands("layer_norm", (0, 24), torch.float32))
    assert y.shape == dx.shape == (0, 24)
    assert not torch.stack(gradients).any()


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [((2, 16385), torch.float32, "more than 65536 bytes"), ((2, 8), torch.float64, "float64")],
)
def test_what_the_kernels_cannot_do_torch_does_and_it_is_counted(shape, dtype, reason, monkeypatch):
    flux_megatron.reset_report()
    (x, weight), _ = operands("rms_norm", shape, dtype)
    with pytest.warns(UserWarning, match=reason):
        y = norm.rms_norm(x, weight)
    assert torch.equal(y, torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-5))
    (((pattern, said), count),) = flux_megatron.report().fallbacks.items()
    assert (pattern, count) == ("rms_norm", 1)
    assert reason in said
    monkeypatch.setattr(settings, "get", lambda: settings.Settings(strict=True))
    with pytest.raises(errors.FallbackRefused, match=reason):
        norm.rms_norm(x, weight)


def test_on_a_cpu_torch_is_no_fallback(monkeypatch):
    monkeypatch.setattr(norm, "INTERPRET", False)
    monkeypatch.setattr(kernels, "norm_forward", lambda *args, **kwargs: pytest.fail("a kernel"))
    flux_megatron.reset_report()
    x = torch.randn(2, 8)
    assert torch.equal(norm.layer_norm(x, torch.ones(8)), torch.nn.functional.layer_norm(x, (8,)))
    assert not flux_megatron.report().fallbacks


@pytest.mark.parametrize(
    ("weight", "bias", "message"),
    [
        (torch.ones(7), None, r"x \[2, 8\] and weight \[7\] given, a weight \[8\]"),
        (torch.ones(8), torch.ones(7), r"bias \[7\] torch.float32 given, \[8\]"),
        (torch.ones(8), torch.ones(8).bfloat16(), r"torch.bfloat16 given, \[8\] torch.float32"),
    ],
)
def test_other_shapes_are_refused(weight, bias, message):
    with pytest.raises(ValueError, match=message):
        norm.layer_norm(torch.ones(2, 8), weight, bias)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives_are_those_of_torch(kind, zero_centered):
    """The node's own first derivatives become torch's, where autograd will differentiate them."""
    given, dy = operands(kind, (6, 24), torch.float32)

    def second() -> list[Tensor]:
        leaves = [leaf.detach().requires_grad_() for leaf in given]
        y = getattr(norm, kind.split()[0])(*leaves, eps=EPS, zero_centered=zero_centered)
        firsts = torch.autograd.grad(y, leaves, dy, create_graph=True)
        return list(torch.autograd.grad(sum(f.pow(2).sum() for f in firsts), leaves[:2]))

    made = second()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norm._Norm, "apply", lambda *args: norm._by_torch(*args))
        wanted = second()
    for ours, torchs in zip(made, wanted, strict=True):
        torch.testing.assert_close(ours, torchs)

"""LayerNorm and RMSNorm over the last dimension: our kernels on GPUs, torch elsewhere.

| | y |
| --- | --- |
| `layer_norm` | (x - mean) / sqrt(var + eps) * gamma + bias |
| `rms_norm` | x / sqrt(mean(x^2) + eps) * gamma |

gamma is the weight or, with `zero_centered`, 1 + weight. The result has the dtype of the weight: an
fp32 residual stream gives the operand of the next GEMM. Kernels run in a node of autograd, and for
torch.compile in operators, which cost the host more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flux_megatron import ops
from flux_megatron.kernels import norm as kernels

# Whether the kernels run on CPU tensors too, in the interpreter: some hundred times slower than
# torch. Only tests of the kernels set it.
INTERPRET = False


class _Options(NamedTuple):
    name: str
    eps: float
    zero_centered: bool


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *,
    eps: float = 1e-5, zero_centered: bool = False,
) -> Tensor:  # fmt: skip
    """x [..., N], weight and bias [N] -> [..., N].

    `ValueError` for other shapes, or a bias of another dtype than the weight.
    """
    return _norm(x, weight, bias, _Options("layer_norm", eps, zero_centered))


def rms_norm(
    x: Tensor, weight: Tensor, *, eps: float = 1e-5, zero_centered: bool = False
) -> Tensor:
    """x [..., N], weight [N] -> [..., N]. `ValueError` for other shapes."""
    return _norm(x, weight, None, _Options("rms_norm", eps, zero_centered))


def _norm(x: Tensor, weight: Tensor, bias: Tensor | None, options: _Options) -> Tensor:
    if x.shape[-1:] != weight.shape:
        raise ValueError(
            f"{options.name}: x {list(x.shape)} and weight {list(weight.shape)} given, "
            f"a weight {list(x.shape[-1:])} expected"
        )
    if bias is not None and (bias.shape, bias.dtype) != (weight.shape, weight.dtype):
        raise ValueError(
            f"{options.name}: bias {list(bias.shape)} {bias.dtype} given, "
            f"{list(weight.shape)} {weight.dtype} as of the weight expected"
        )
    if not (x.is_cuda or INTERPRET) or not x.numel():
        return _by_torch(x, weight, bias, options)
    traced = ops.is_traced(options.name)
    if not (traced or ops.is_plain(x)):
        return _by_torch(x, weight, bias, options)
    if _refused(options.name, x.dtype, weight.dtype, x.shape[-1], x.is_cuda):
        return _by_torch(x, weight, bias, options)
    if traced:
        return _operator(x, weight, bias, *options)[0]
    return _Norm.apply(x, weight, bias, options)


def _refused(name: str, *facts: Any) -> bool:
    """Whether the kernels cannot do it; the fallback is counted."""
    reason = kernels.supports(*facts)
    if reason:
        ops.note_fallback(name, f"torch computes it: {reason}")
    return reason is not None


# torch.compile takes the answer as a constant of its graph: see `flux_megatron.problem.plan_text`
_refused._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _by_torch(x: Tensor, weight: Tensor, bias: Tensor | None, options: _Options) -> Tensor:
    if options.zero_centered:  # below fp32 1 + weight would lose bits
        x = x.to(torch.promote_types(x.dtype, torch.float32))
    gamma = weight.to(x.dtype) + 1.0 if options.zero_centered else weight.to(x.dtype)
    if options.name == "rms_norm":
        return F.rms_norm(x, weight.shape, gamma, options.eps).to(weight.dtype)
    beta = None if bias is None else bias.to(x.dtype)
    return F.layer_norm(x, weight.shape, gamma, beta, options.eps).to(weight.dtype)


def _rows(x: Tensor) -> Tensor:
    """[..., N] as [M, N], without a copy if the rows have one stride, as in a slice of QKV."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, options: _Options
) -> tuple[Tensor, Tensor | None, Tensor]:
    """y, and of each row the fp32 mean (None for `rms_norm`) and 1 / deviation."""
    y, mean, rstd = kernels.norm_forward(
        _rows(x), weight, bias, eps=options.eps, one_plus=options.zero_centered,
        center=options.name == "layer_norm",
    )  # fmt: skip
    return y.resize_(x.shape), mean, rstd  # not a view, which a caller could not modify in place


def _backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, zero_centered: bool,
    bias: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dx, and the gradients of weight and, with `bias`, bias, as rows of one matrix."""
    rows = _rows(x)
    dx, gradients = kernels.norm_backward(
        dy.reshape(rows.shape).contiguous(), rows, weight, mean, rstd, one_plus=zero_centered,
        bias=bias,
    )  # fmt: skip
    return dx.view(x.shape), gradients


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, options: _Options
    ) -> Tensor:
        y, mean, rstd = _forward(x, weight, bias, options)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.options = options
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor):
        x, weight, bias, mean, rstd = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *_double_backward(ctx, dy), None
        given = x, weight, mean, rstd, ctx.options.zero_centered, bias is not None
        dx, gradients = _backward(dy, *given)
        return dx, gradients[0], gradients[1] if bias is not None else None, None


def _double_backward(ctx: Any, dy: Tensor) -> list[Tensor | None]:
    """The gradients of torch's norm, for autograd to differentiate again."""
    given = x, weight, bias = ctx.saved_tensors[:3]
    y = _by_torch(x, weight, bias, ctx.options)
    wanted = [one for one, needs in zip(given, ctx.needs_input_grad, strict=False) if needs]
    found = iter(torch.autograd.grad(y, wanted, dy, create_graph=True))
    return [next(found) if needs else None for needs in ctx.needs_input_grad[:3]]


@torch.library.custom_op("flux_megatron::norm", mutates_args=())
def _operator(
    x: Tensor, weight: Tensor, bias: Tensor | None, name: str, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """What `_forward` gives; an empty mean for `rms_norm`."""
    y, mean, rstd = _forward(x, weight, bias, _Options(name, eps, zero_centered))
    return y, rstd.new_empty(0) if mean is None else mean, rstd


@_operator.register_fake
def _(x, weight, bias, name, eps, zero_centered):
    rows = x.shape[:-1].numel()
    mean = weight.new_empty(rows if name == "layer_norm" else 0, dtype=torch.float32)
    return weight.new_empty(x.shape), mean, weight.new_empty(rows, dtype=torch.float32)


@torch.library.custom_op("flux_megatron::norm_backward", mutates_args=())
def _operator_backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, zero_centered: bool,
    bias: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _backward(dy, x, weight, mean if mean.numel() else None, rstd, zero_centered, bias)


@_operator_backward.register_fake
def _(dy, x, weight, mean, rstd, zero_centered, bias):
    return x.new_empty(x.shape), weight.new_empty(1 + bias, weight.shape[0])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, _, _, ctx.zero_centered = inputs
    ctx.has_bias = bias is not None
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(x, weight, *output[1:])


def _gradients(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    dx, gradients = _operator_backward(dy, *ctx.saved_tensors, ctx.zero_centered, ctx.has_bias)
    return dx, gradients[0], gradients[1] if ctx.has_bias else None, None, None, None


_operator.register_autograd(_gradients, setup_context=_keep)

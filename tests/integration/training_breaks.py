"""Ways to break our layers, and the feature that each of them concerns: the comparison with stock
has to see them.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from flux_megatron.integration import layers as our_layers
from flux_megatron.integration import main_grad
from flux_megatron.nn import functions, linear_passes

Break = Callable[[], contextlib.AbstractContextManager[Any]]


def replacing(owner: Any, name: str) -> Callable[[Callable[[Any], Any]], Break]:
    """A context in which `owner.name` is what the decorated function makes of it."""

    def of_function(make: Callable[[Any], Any]) -> Break:
        return lambda: mock.patch.object(owner, name, make(getattr(owner, name)))

    return of_function


@replacing(functions.ops, "run_gemm_rs")
def terms_missing(run: Any) -> Any:
    """Rank 1 contributes nothing to the sums of forward."""

    def without(x, *args, **options):
        return run(torch.zeros_like(x) if dist.get_rank() == 1 else x, *args, **options)

    return without


@replacing(linear_passes.pieces, "start_gemm_ar")
def dx_not_summed(_: Any) -> Any:
    """Without sequence parallelism."""

    def alone(dy, w, group, layout):
        dx = dy @ w
        return types.SimpleNamespace(finish=lambda: dx)

    return alone


@replacing(main_grad, "placeholder_gradient")
def dummy_added(make: Any) -> Any:
    """Megatron is not told that the gradient is in main_grad, and adds what autograd was given."""

    def untold(weight, dtype):
        dummy = make(weight, dtype)
        weight.grad_added_to_main_grad = False
        return dummy.fill_(0.01)

    return untold


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """The layers leave their calls to Megatron and do not say so."""
    with (
        mock.patch.object(our_layers, "_left_to_megatron", return_value="no reason"),
        mock.patch.object(our_layers, "note_fallback"),
    ):
        yield


@replacing(linear_passes, "_shaped")
def coarse_sums(finish: Any) -> Any:
    """Sums rounded to six bits, where bf16 has eight."""

    def rounded(made, shape):
        mantissa, exponent = torch.frexp(made.float())
        made.copy_(torch.ldexp((mantissa * 64).round() / 64, exponent))
        return finish(made, shape)

    return rounded


# of other features `terms_missing`
BREAKS: dict[str, Break] = {
    "sequence parallel": silent,
    "tensor parallel over nodes": silent,
    "sequence parallel off": dx_not_summed,
    **dict.fromkeys(("wgrad fusion", "pipeline, tied, wgrad fusion"), dummy_added),
    **dict.fromkeys(("bf16", "fp16", "fp32 residuals"), coarse_sums),
}

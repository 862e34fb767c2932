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


@contextlib.contextmanager
def terms_missing() -> Iterator[None]:
    """Rank 1 contributes nothing to the sums of forward."""
    run = functions.ops.run_gemm_rs

    def without(x, *args, **options):
        return run(torch.zeros_like(x) if dist.get_rank() == 1 else x, *args, **options)

    with mock.patch.object(functions.ops, "run_gemm_rs", without):
        yield


@contextlib.contextmanager
def dx_not_summed() -> Iterator[None]:
    """Without sequence parallelism."""

    def alone(dy, w, group, layout):
        dx = dy @ w
        return types.SimpleNamespace(finish=lambda: dx)

    with mock.patch.object(functions.ops, "start_gemm_ar", alone):
        yield


@contextlib.contextmanager
def dummy_added() -> Iterator[None]:
    """Megatron is not told that the gradient is in main_grad, and adds what autograd was given."""
    make = main_grad.placeholder_gradient

    def untold(weight, dtype):
        dummy = make(weight, dtype)
        weight.grad_added_to_main_grad = False
        return dummy.fill_(0.01)

    with mock.patch.object(main_grad, "placeholder_gradient", untold):
        yield


@contextlib.contextmanager
def dummy_not_zero() -> Iterator[None]:
    make = main_grad.placeholder_gradient
    with mock.patch.object(main_grad, "placeholder_gradient", lambda *a: make(*a).fill_(0.01)):
        yield


@contextlib.contextmanager
def last_microbatch_alone() -> Iterator[None]:
    add = main_grad.accumulate_wgrad
    with mock.patch.object(main_grad, "accumulate_wgrad", lambda *a, beta=0: add(*a, beta=beta)):
        yield


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """The layers leave their calls to Megatron and do not say so."""
    with (
        mock.patch.object(our_layers, "_left_to_megatron", return_value="no reason"),
        mock.patch.object(our_layers, "note_fallback"),
    ):
        yield


@contextlib.contextmanager
def old_weights() -> Iterator[None]:
    """A layer keeps the weight that it saw first."""
    run, kept = functions.ops.run_gemm_rs, {}

    def with_kept(x, w, *args, **options):
        return run(x, kept.setdefault(w.data_ptr(), w.detach().clone()), *args, **options)

    with mock.patch.object(functions.ops, "run_gemm_rs", with_kept):
        yield


@contextlib.contextmanager
def no_dx_beside_a_frozen_weight() -> Iterator[None]:
    forward = functions.row_parallel_linear

    def without(x, w, **options):
        return forward(x if w.requires_grad else x.detach(), w, **options)

    with mock.patch.object(functions, "row_parallel_linear", without):
        yield


@contextlib.contextmanager
def first_length_for_all() -> Iterator[None]:
    """Rows that the first call did not have are lost."""
    gather, rows = functions.ops.run_ag_gemm, []

    def cut(x, w, *args, **options):
        y = gather(x, w, *args, **options)
        rows.append(y.shape[0])
        y[rows[0] :] = 0
        return y

    with mock.patch.object(functions.ops, "run_ag_gemm", cut):
        yield


@contextlib.contextmanager
def coarse_sums() -> Iterator[None]:
    """Sums rounded to six bits, where bf16 has eight."""
    finish = linear_passes._shaped

    def rounded(made, shape):
        mantissa, exponent = torch.frexp(made.float())
        made.copy_(torch.ldexp((mantissa * 64).round() / 64, exponent))
        return finish(made, shape)

    with mock.patch.object(linear_passes, "_shaped", rounded):
        yield


@contextlib.contextmanager
def random_numbers_drawn() -> Iterator[None]:
    finish = linear_passes._shaped
    with mock.patch.object(linear_passes, "_shaped", lambda *a: (torch.rand(1), finish(*a))[1]):
        yield


BREAKS: dict[str, Break] = {
    "sequence parallel": silent,
    "sequence parallel off": dx_not_summed,
    "wgrad fusion": dummy_added,
    "wgrad fusion, tied": dummy_not_zero,
    "selective recompute": last_microbatch_alone,
    "dropout": random_numbers_drawn,
    "LoRA": no_dx_beside_a_frozen_weight,
    "variable sequence lengths": first_length_for_all,
    "tensor parallel over nodes": silent,
    "pipeline, tied, wgrad fusion": dummy_added,
    "pipeline, variable sequence lengths": first_length_for_all,
    "distributed optimizer, overlapped": old_weights,
    "bf16": coarse_sums,
    "fp16": coarse_sums,
    "fp32 residuals": coarse_sums,
}

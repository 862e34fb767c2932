"""xFormers' fused sequence parallelism: chunked library GEMMs on two streams."""

from __future__ import annotations

from importlib import import_module, util

import torch
from torch import Tensor

from flux_megatron.bench.backward import Backward
from flux_megatron.bench.candidates import Call
from flux_megatron.bench.forward import Forward
from flux_megatron.bench.targets import COMPETITORS


class Xformers:
    """Its backward forms the weight's gradient in the dtype of the operands and does not accumulate
    it.

    That is less work than the other candidates do; it is left so.
    """

    name = "xformers"

    def names(self, pattern: str) -> tuple[str, ...]:
        return (self.name,) if self.name in COMPETITORS[pattern] else ()

    def unavailable(self) -> str | None:
        if util.find_spec("xformers") is None:
            return "xformers is not installed"
        try:
            import_module("xformers.ops.seqpar")
        except Exception as error:  # a build for another torch fails in many ways
            return f"xformers cannot be imported: {type(error).__name__}: {error}"
        return None

    def build(self, experiment: Forward | Backward) -> dict[str, Call]:
        if isinstance(experiment, Backward):
            return {self.name: _backward(experiment)}
        fused = import_module("xformers.ops.sequence_parallel_fused_ops")
        gathers = experiment.case.spec.gathers
        op = fused.fused_allgather_and_linear if gathers else fused.fused_linear_and_reducescatter
        x, w, group = experiment.x, experiment.right.t(), experiment.group
        return {self.name: lambda: (op(x, w, group=group),)}


def _backward(e: Backward) -> Call:
    seqpar = import_module("xformers.ops.seqpar")
    x, right = e.x.detach().requires_grad_(), e.w.detach().t().requires_grad_()
    if e.column:
        leading = seqpar.sequence_parallel_leading_matmul
        (y,) = leading(x, [right], fuse=True, process_group=e.group)
    else:
        trailing = seqpar.sequence_parallel_trailing_matmul
        y = trailing(x, right, fuse=True, process_group=e.group)

    def call() -> tuple[Tensor, Tensor]:
        dx, dw = torch.autograd.grad(y, (x, right), e.dy, retain_graph=True)
        return dx, dw.t()

    return call

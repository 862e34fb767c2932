"""TransformerEngine's userbuffers, which Megatron's --tp-comm-overlap enables.

The calls are those that te.Linear makes in bf16, without its bookkeeping on the host.
"""

from __future__ import annotations

import contextlib
import os
from functools import partial
from importlib import import_module, util
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flux_megatron.lab.bench.backward import Backward
from flux_megatron.lab.bench.candidates import Call
from flux_megatron.lab.bench.forward import Forward

# Buffers by the name of the GEMM. proj_fprop, by default a pipeline, is a ring here, so one
# initialisation has both kinds of reduce-scatter.
AG_RING, RS_RING, RS_PIPELINE = "fc1_fprop", "proj_fprop", "fc2_fprop"
BULK_AG, BULK_RS = "fc1_dgrad", "fc1_wgrad"
DGRAD_AG_RING = "fc2_dgrad"


class TransformerEngine:
    """Its buffers have one shape: a change of M or of the hidden size makes new ones."""

    name = "te"

    def __init__(self) -> None:
        self._shape: tuple[int, int] | None = None

    def unavailable(self) -> str | None:
        if util.find_spec("transformer_engine") is None:
            return "transformer_engine is not installed"
        if os.environ.get("UB_SKIPMC") != "1":
            return "UB_SKIPMC=1 expected: without it userbuffers create multicast objects"
        try:
            import_module("transformer_engine.pytorch")
        except Exception as error:  # a build for another torch fails in many ways
            return f"transformer_engine cannot be imported: {type(error).__name__}: {error}"
        return None

    def build(self, experiment: Forward | Backward) -> dict[str, Call]:
        self._base = import_module("transformer_engine.pytorch.module.base")
        self._gemm = import_module("transformer_engine.pytorch.cpp_extensions").general_gemm
        self._kinds = import_module("transformer_engine_torch").CommOverlapType
        self._prepare(experiment.case.M, experiment)
        if isinstance(experiment, Backward):
            backward = self._column_backward if experiment.column else self._row_backward
            return {
                "te": partial(backward, experiment, experiment.x.detach(), experiment.w.detach())
            }
        layout = "TN" if experiment.case.layout == "nt" else "NN"
        if experiment.case.pattern == "ag_gemm":
            return {"te_ring": partial(self._ag_gemm, experiment, layout)}
        methods = {"te_ring": RS_RING, "te_pipeline": RS_PIPELINE}
        return {n: partial(self._gemm_rs, experiment, layout, b) for n, b in methods.items()}

    def _prepare(self, M: int, experiment: Forward | Backward) -> None:
        scatters = isinstance(experiment, Forward) and experiment.case.pattern == "gemm_rs"
        travels = experiment.y if scatters else experiment.gathered
        shape = (M, travels.shape[1])
        if shape == self._shape:
            return
        if self._shape is not None:
            torch.cuda.synchronize(experiment.device)
            dist.barrier(group=experiment.group)
            self._base.destroy_ub()
        self._shape = None
        R = experiment.group.size()
        ring = {"method": "ring_exchange", "num_sm": 1, "cga_size": 1, "set_sm_margin": False}
        with contextlib.redirect_stdout(None):
            self._base.initialize_ub(
                shape=list(shape), tp_size=R, dtype=travels.dtype, bootstrap_backend="gloo",
                quantization_modes=[self._base.UserBufferQuantizationMode.NONE],
                ub_cfgs={RS_RING: {**ring, "num_splits": R}},
            )  # fmt: skip
        self._shape = shape

    def _filled(self, name: str, shard: Tensor, group: Any) -> tuple[Any, Tensor]:
        """A buffer, and the rows of `shard` in it, which the next GEMM on it gathers."""
        buffer = self._base.get_ub(name, False)
        fill = self._base.fill_userbuffers_buffer_for_all_gather
        return buffer, fill(buffer, shard, None, group)[0]

    def _ag_gemm(self, e: Forward, layout: str) -> tuple[Tensor]:
        buffer, gathered = self._filled(AG_RING, e.x, e.group)
        options = {"out_dtype": e.x.dtype, "layout": layout, "ub_type": self._kinds.AG}
        return (self._gemm(e.w, gathered, ub=buffer, **options)[0],)

    def _gemm_rs(self, e: Forward, layout: str, name: str) -> tuple[Tensor]:
        y = torch.empty_like(e.y)
        options = {"out_dtype": e.x.dtype, "layout": layout, "extra_output": y}
        ub = self._base.get_ub(name, False)
        self._gemm(e.w, e.x, ub=ub, ub_type=self._kinds.RS, **options)
        return (y,)

    def _wgrad(self, e: Backward, dy: Tensor, x: Tensor, **options: Any) -> None:
        """main_grad += dy^T x, with another communication beside it if given."""
        self._gemm(
            x, dy, layout="NT", out=e.main_grad, out_dtype=e.main_grad.dtype, accumulate=True,
            grad=True, **options,
        )  # fmt: skip

    def _column_backward(self, e: Backward, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """Gather x beside dgrad, scatter dx beside wgrad, both by userbuffers ("bulk")."""
        scatter = self._base.get_ub(BULK_RS, False)
        gather, gathered = self._filled(BULK_AG, x, e.group)
        self._gemm(
            w, e.dy, layout="NN", grad=True, out=scatter.get_buffer(local_chunk=False),
            out_dtype=e.dy.dtype, ub=gather, ub_type=self._kinds.AG, bulk_overlap=True,
        )  # fmt: skip
        self._wgrad(e, e.dy, gathered, ub=scatter, ub_type=self._kinds.RS, bulk_overlap=True)
        return scatter.get_buffer(local_chunk=True).clone(), e.main_grad

    def _row_backward(self, e: Backward, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """Gather dy beside dgrad; wgrad reads it from the buffer."""
        buffer, gathered = self._filled(DGRAD_AG_RING, e.dy, e.group)
        options = {"out_dtype": e.dy.dtype, "layout": "NN", "grad": True}
        dx = self._gemm(w, gathered, ub=buffer, ub_type=self._kinds.AG, **options)[0]
        self._wgrad(e, gathered, x)
        return dx, e.main_grad

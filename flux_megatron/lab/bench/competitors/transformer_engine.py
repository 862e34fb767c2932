"""TransformerEngine's userbuffers, which Megatron's --tp-comm-overlap enables.

The calls are those that te.Linear makes in bf16, without its bookkeeping on the host.
"""

from __future__ import annotations

import contextlib
import os
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

    def names(self, pattern: str) -> tuple[str, ...]:
        names = {
            "ag_gemm": ("te_ring",),
            "gemm_rs": ("te_ring", "te_pipeline"),
            "backward": ("te",),
        }
        return names.get(pattern, ())

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
        case = experiment.case
        self._prepare(case.M, experiment)
        if isinstance(experiment, Backward):
            backward = _column_backward if experiment.column else _row_backward
            return {"te": backward(experiment)}
        if case.pattern == "ag_gemm":
            return {"te_ring": _ag_gemm(experiment)}
        methods = {"te_ring": RS_RING, "te_pipeline": RS_PIPELINE}
        return {name: _gemm_rs(experiment, buffer) for name, buffer in methods.items()}

    def _prepare(self, M: int, experiment: Forward | Backward) -> None:
        scatters = isinstance(experiment, Forward) and experiment.case.pattern == "gemm_rs"
        travels = experiment.y if scatters else experiment.gathered
        shape = (M, travels.shape[1])
        if shape == self._shape:
            return
        base = _base()
        if self._shape is not None:
            torch.cuda.synchronize(experiment.device)
            dist.barrier(group=experiment.group)
            base.destroy_ub()
        self._shape = None
        world_size = experiment.group.size()
        ring = {"method": "ring_exchange", "num_sm": 1, "cga_size": 1, "set_sm_margin": False}
        with contextlib.redirect_stdout(None):
            base.initialize_ub(
                shape=list(shape),
                tp_size=world_size,
                quantization_modes=[base.UserBufferQuantizationMode.NONE],
                dtype=travels.dtype,
                ub_cfgs={RS_RING: {**ring, "num_splits": world_size}},
                bootstrap_backend="gloo",
            )
        self._shape = shape


def _base() -> Any:
    return import_module("transformer_engine.pytorch.module.base")


def _gemm() -> Any:
    return import_module("transformer_engine.pytorch.cpp_extensions").general_gemm


def _kinds() -> Any:
    return import_module("transformer_engine_torch").CommOverlapType


def _fill(buffer: Any, shard: Tensor, group: Any) -> Tensor:
    """The rows of `shard` in the buffer, which the next GEMM on this buffer gathers."""
    gathered, _ = _base().fill_userbuffers_buffer_for_all_gather(buffer, shard, None, group)
    return gathered


def _ag_gemm(e: Forward) -> Call:
    gemm, kinds, base = _gemm(), _kinds(), _base()
    layout = "TN" if e.case.layout == "nt" else "NN"

    def call() -> tuple[Tensor]:
        buffer = base.get_ub(AG_RING, False)
        gathered = _fill(buffer, e.x, e.group)
        options = {"out_dtype": e.x.dtype, "layout": layout, "ub": buffer, "ub_type": kinds.AG}
        return (gemm(e.w, gathered, **options)[0],)

    return call


def _gemm_rs(e: Forward, name: str) -> Call:
    gemm, kinds, base = _gemm(), _kinds(), _base()
    layout = "TN" if e.case.layout == "nt" else "NN"

    def call() -> tuple[Tensor]:
        y = torch.empty_like(e.y)
        options = {"out_dtype": e.x.dtype, "layout": layout, "extra_output": y}
        gemm(e.w, e.x, ub=base.get_ub(name, False), ub_type=kinds.RS, **options)
        return (y,)

    return call


def _wgrad(e: Backward, dy: Tensor, x: Tensor, **options: Any) -> None:
    """main_grad += dy^T x, with another communication beside it if given."""
    _gemm()(
        x, dy, layout="NT", out=e.main_grad, out_dtype=e.main_grad.dtype, accumulate=True,
        grad=True, **options,
    )  # fmt: skip


def _column_backward(e: Backward) -> Call:
    """Gather x beside dgrad, scatter dx beside wgrad, both by userbuffers ("bulk")."""
    gemm, kinds, base = _gemm(), _kinds(), _base()
    x, w = e.x.detach(), e.w.detach()

    def call() -> tuple[Tensor, Tensor]:
        gather, scatter = base.get_ub(BULK_AG, False), base.get_ub(BULK_RS, False)
        gathered = _fill(gather, x, e.group)
        gemm(
            w, e.dy, layout="NN", grad=True, out=scatter.get_buffer(local_chunk=False),
            out_dtype=e.dy.dtype, ub=gather, ub_type=kinds.AG, bulk_overlap=True,
        )  # fmt: skip
        _wgrad(e, e.dy, gathered, ub=scatter, ub_type=kinds.RS, bulk_overlap=True)
        return scatter.get_buffer(local_chunk=True).clone(), e.main_grad

    return call


def _row_backward(e: Backward) -> Call:
    """Gather dy beside dgrad; wgrad reads it from the buffer."""
    gemm, kinds, base = _gemm(), _kinds(), _base()
    x, w = e.x.detach(), e.w.detach()

    def call() -> tuple[Tensor, Tensor]:
        buffer = base.get_ub(DGRAD_AG_RING, False)
        gathered = _fill(buffer, e.dy, e.group)
        dx = gemm(
            w, gathered, layout="NN", grad=True, out_dtype=e.dy.dtype, ub=buffer, ub_type=kinds.AG
        )[0]
        _wgrad(e, gathered, x)
        return dx, e.main_grad

    return call

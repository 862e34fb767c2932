"""torch's asynchronous tensor parallelism: chunked library GEMMs over symmetric memory."""

from __future__ import annotations

from functools import partial
from importlib import import_module

import torch
import torch.distributed as dist
from torch import Tensor

from flux_megatron.lab.bench.backward import Backward
from flux_megatron.lab.bench.candidates import Call
from flux_megatron.lab.bench.forward import Forward
from flux_megatron.wgrad import accumulate_wgrad_by_torch


class AsyncTp:
    """Its operators have no backward: this joins forward and backward as its users do."""

    name = "async_tp"

    def unavailable(self) -> str | None:
        if not torch.cuda.is_available():
            return "needs GPUs"
        import_module("torch.distributed._symmetric_memory")  # registers the operators
        if not hasattr(torch.ops.symm_mem, "fused_all_gather_matmul"):
            return f"torch {torch.__version__} has no symm_mem.fused_all_gather_matmul"
        return None

    def build(self, experiment: Forward | Backward) -> dict[str, Call]:
        symm_mem = import_module("torch.distributed._symmetric_memory")
        name = experiment.group.group_name
        shard_bytes = experiment.gathered.nbytes + experiment.partial.nbytes
        symm_mem.get_symm_mem_workspace(name, min_size=2 * shard_bytes)  # not while timed
        x, w = experiment.x.detach(), experiment.w.detach()
        if isinstance(experiment, Backward):
            backward = _column_backward if experiment.column else _row_backward
            return {self.name: partial(backward, experiment, x, w, name)}
        return {self.name: partial(_forward, experiment, x, name)}


def _forward(e: Forward, x: Tensor, name: str) -> tuple[Tensor]:
    if e.case.spec.gathers:
        gathered_gemm = torch.ops.symm_mem.fused_all_gather_matmul
        return (gathered_gemm(x, [e.right], 0, name, return_A=False)[1][0],)
    return (torch.ops.symm_mem.fused_matmul_reduce_scatter(x, e.right, "sum", 0, name),)


def _column_backward(e: Backward, x: Tensor, w: Tensor, name: str) -> tuple[Tensor, Tensor]:
    gather = dist.all_gather_into_tensor(e.gathered, x, group=e.group, async_op=True)
    dx = torch.ops.symm_mem.fused_matmul_reduce_scatter(e.dy, w, "sum", 0, name)
    gather.wait()
    accumulate_wgrad_by_torch(e.main_grad, e.dy, e.gathered)
    return dx, e.main_grad


def _row_backward(e: Backward, x: Tensor, w: Tensor, name: str) -> tuple[Tensor, Tensor]:
    fused = torch.ops.symm_mem.fused_all_gather_matmul
    gathered, (dx,) = fused(e.dy, [w], 0, name, return_A=True)
    accumulate_wgrad_by_torch(e.main_grad, gathered, x)
    return dx, e.main_grad

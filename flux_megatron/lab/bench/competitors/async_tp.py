"""torch's asynchronous tensor parallelism: chunked library GEMMs over symmetric memory."""

from __future__ import annotations

from importlib import import_module

import torch
import torch.distributed as dist
from torch import Tensor

from flux_megatron.lab.bench.backward import Backward
from flux_megatron.lab.bench.candidates import Call
from flux_megatron.lab.bench.forward import Forward
from flux_megatron.lab.bench.suites import PEERS
from flux_megatron.wgrad import accumulate_wgrad_by_torch


class AsyncTp:
    """Its operators have no backward: this joins forward and backward as its users do."""

    name = "async_tp"

    def names(self, pattern: str) -> tuple[str, ...]:
        return (self.name,) if self.name in PEERS[pattern] else ()

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
        if isinstance(experiment, Backward):
            column, row = _column_backward, _row_backward
            return {self.name: column(experiment) if experiment.column else row(experiment)}
        gathers = experiment.case.spec.gathers
        return {self.name: _ag_gemm(experiment) if gathers else _gemm_rs(experiment)}


def _ag_gemm(experiment: Forward) -> Call:
    x, rights, name = experiment.x, [experiment.right], experiment.group.group_name
    fused = torch.ops.symm_mem.fused_all_gather_matmul
    return lambda: (fused(x, rights, 0, name, return_A=False)[1][0],)


def _gemm_rs(experiment: Forward) -> Call:
    x, right, name = experiment.x, experiment.right, experiment.group.group_name
    fused = torch.ops.symm_mem.fused_matmul_reduce_scatter
    return lambda: (fused(x, right, "sum", 0, name),)


def _column_backward(e: Backward) -> Call:
    x, w, name = e.x.detach(), e.w.detach(), e.group.group_name
    fused = torch.ops.symm_mem.fused_matmul_reduce_scatter

    def call() -> tuple[Tensor, Tensor]:
        gather = dist.all_gather_into_tensor(e.gathered, x, group=e.group, async_op=True)
        dx = fused(e.dy, w, "sum", 0, name)
        gather.wait()
        accumulate_wgrad_by_torch(e.main_grad, e.dy, e.gathered)
        return dx, e.main_grad

    return call


def _row_backward(e: Backward) -> Call:
    x, w, name = e.x.detach(), e.w.detach(), e.group.group_name
    fused = torch.ops.symm_mem.fused_all_gather_matmul

    def call() -> tuple[Tensor, Tensor]:
        gathered, (dx,) = fused(e.dy, [w], 0, name, return_A=True)
        accumulate_wgrad_by_torch(e.main_grad, gathered, x)
        return dx, e.main_grad

    return call

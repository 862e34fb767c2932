"""The operands' device is the current one while a call is checked, planned and enqueued, and while
memory is made for it: a GPU's may not be where nobody has called `set_device`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from ranks import FUSED, on_cpu_ranks

import flux_megatron
from flux_megatron import ops, pieces
from flux_megatron.device import Channel
from flux_megatron.embedding import fused_bags
from flux_megatron.expert_parallel import call as expert_call
from flux_megatron.expert_parallel import fused as fused_experts
from flux_megatron.expert_parallel import ops as expert_ops
from flux_megatron.nn.functions import column_parallel_linear
from flux_megatron.overlap import calls, collectives
from flux_megatron.problem import Plan
from flux_megatron.symm import steps, workspace, workspaces
from flux_megatron.symm.cpu_backend import CpuCopyEngine
from flux_megatron.tuning import choice

CPU = torch.device("cpu")


def every_kind_of_call() -> None:
    group = dist.group.WORLD
    x, w = torch.ones(4, 4, requires_grad=True), torch.ones(4, 4, requires_grad=True)
    for operation in ops.OPERATIONS.values():
        operation(x.detach(), w.detach(), group)
        operation(x.detach(), w.detach(), group, plan=Plan("sequential"))
    column_parallel_linear(x, w, None, group=group).sum().backward()
    ops.run_ag_gemm(x.detach(), w.detach(), None, group, consume=lambda rows: None)
    pieces.start_gemm_rs(x.detach(), w.detach(), group, plan=Plan("pipelined")).finish()
    gather = pieces.start_gather(x.detach(), w.detach(), group)
    gather.complete()
    gather.close()
    weight = torch.ones(1, 4, 8, requires_grad=True)
    indices, offsets = torch.zeros(2, dtype=torch.int64), torch.arange(3)
    flux_megatron.embedding_all_to_all(weight, indices, offsets, group).sum().backward()
    counts = torch.ones(2, 1, dtype=torch.int32)
    y, _ = expert_ops.a2a_gemm(x[:2], w[None], counts, group, capacity=2)
    expert_ops.gemm_a2a(y, w[None], counts, group, tokens=2)
    with Channel("own", group, CPU).begin(64):
        ops.note_fallback("own", "a kernel is launched here")


@on_cpu_ranks(2, environment=FUSED)
def test_every_step_is_made_with_the_operands_device(rank):
    depth, outside, made = [0], [], []

    @contextmanager
    def active(device: torch.device) -> Iterator[None]:
        assert device == CPU
        depth[0] += 1
        try:
            yield
        finally:
            depth[0] -= 1

    def watch(owner: Any, name: str) -> None:
        step = getattr(owner, name)

        def watched(*given, **named):
            made.append(name)
            outside.extend([name] if not depth[0] else [])
            return step(*given, **named)

        setattr(owner, name, watched)

    workspace.active = workspaces.active = steps.active = calls.active = active
    steps.is_active = lambda device: depth[0] > 0
    for owner, *names in (
        (workspace.Workspace, "__init__", "begin"), (choice, "choose"), (expert_call, "_choose"),
        (ops, "note_fallback"), (calls.InFlight, "_begin"), (fused_bags, "forward", "backward"),
        (fused_experts, "a2a_gemm", "gemm_a2a"), (collectives, "_start"),
        (CpuCopyEngine, "fork", "join", "copy", "copy_here"),
    ):  # fmt: skip
        for name in names:
            watch(owner, name)
    every_kind_of_call()
    assert depth == [0]
    assert (outside, len({*made})) == ([], 15)

"""One rank of one tree of `trees.py`. Reads a command a line, answers with JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

os.environ.setdefault("FLUX_MEGATRON_TIMEOUT_S", "20")

import gpu_run  # type: ignore[import-not-found]  # of this checkout; all else is the tree's
import torch
import torch.distributed as dist
import triton

from flux_megatron import ops
from flux_megatron.lab.bench import operations
from flux_megatron.overlap import registry
from flux_megatron.problem import Pattern, Plan, Problem

# `auto`: the plan that each tree's own choice gives
STRATEGIES = ("auto", "hopper", "fused", "low_latency")


class Rank:
    def __init__(self, commit: str, calls: int, folder: str) -> None:
        self.run = gpu_run.start(None, commit, 600)
        self.calls, self.group, self.device = calls, self.run.group, self.run.device
        packages = [Path(str(package.__file__)) for package in (ops, triton)]
        inside = [file.is_relative_to(Path(folder).resolve()) for file in packages]
        assert not folder or any(inside), f"{folder} has none of {[*map(str, packages)]}"
        self.operands: list[torch.Tensor] = []
        self.made: dict[str, tuple[Callable[[], torch.Tensor], torch.Tensor]] = {}

    def about(self, variables: str = "") -> dict:
        """With the values of these variables of the environment."""
        return asdict(self.run.about) | {name: os.environ[name] for name in variables.split()}

    def cases(self, shape: str) -> dict:
        """Local M x N x K, and the layout of w: x of AG+GEMM is [M / R, K], w [N, K] or [K, N]; x
        of GEMM+RS and GEMM+AR is [M, N], w [K, N] or [N, K].
        """
        sizes, layout = shape.split()
        M, N, K = map(int, sizes.split("x"))
        R = self.group.size()
        turned = layout == "nn"
        shapes = (M // R, K), (K, N) if turned else (N, K), (N, K) if turned else (K, N), (M, N)
        x, w, back, rows = self.operands = [
            torch.empty(size, dtype=torch.bfloat16, device=self.device) for size in shapes
        ]
        made = torch.Generator(self.device).manual_seed(1 + self.group.rank())
        operations.fill(made, *self.operands)
        gathered = x.new_empty(M, K)
        dist.all_gather_into_tensor(gathered, x, group=self.group)
        self.operands.append(gathered)
        right = w if turned else w.t()
        # in fp32, where whole numbers stay whole
        product = (gathered.float() @ right.float()).to(x.dtype)
        summed = rows.float() @ (back if turned else back.t()).float()
        dist.all_reduce(summed, group=self.group)
        summed = summed.to(x.dtype)
        reduced = summed.chunk(R)[self.group.rank()]
        self.made = {f"library gemm {shape}": (lambda: gathered @ right, product)}
        if self.device.type == "cuda" and torch.cuda.get_device_capability()[0] == 9:
            from flux_megatron.kernels.hopper import ag_gemm as hopper_ag_gemm

            alone = partial(hopper_ag_gemm.gemm, gathered, w, layout)
            self.made[f"hopper gemm {shape}"] = (alone, product)
        for strategy in STRATEGIES:
            for pattern, a, b, expected in (
                (Pattern.AG_GEMM, x, w, product), (Pattern.GEMM_RS, rows, back, reduced),
                (Pattern.GEMM_AR, rows, back, summed),
            ):  # fmt: skip
                plan = self._plan(pattern, a, b, layout, strategy)
                if plan is not None or strategy == "auto":
                    call = partial(
                        ops.OPERATIONS[pattern], a, b, self.group, layout=layout, plan=plan
                    )
                    self.made[f"{pattern} {strategy} {shape}"] = (call, expected)
        return {"cases": [*self.made]}

    def _plan(self, pattern: Pattern, x, w, layout: str, strategy: str) -> Plan | None:
        """The strategy's first plan; None where it cannot run, and of `auto`."""
        if strategy == "auto":
            return None
        N = w.shape[1 if layout == "nn" else 0]
        problem = Problem.of_operands(
            pattern, x.shape[0], N, x.shape[1], "bfloat16", self.group.size(), layout,
            self.device.type,
        )  # fmt: skip
        if registry.refusal(problem, strategy, None) is not None:
            return None
        return registry.strategy(problem, strategy).default_plan(problem)

    def check(self, case: str) -> dict:
        call, expected = self.made[case]
        return {"exact": all([torch.equal(call(), expected) for _ in range(3)])}

    def renew(self) -> dict:
        gpu_run.fill_random(*self.operands)
        return {}

    def time(self, case: str) -> dict:
        call, _ = self.made[case]
        call()
        dist.barrier(group=self.group)
        if self.device.type == "cpu":
            begin = time.perf_counter()
            for _ in range(self.calls):
                call()
            return {"us": 1e6 * (time.perf_counter() - begin) / self.calls}
        torch.cuda.synchronize()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        marks[0].record()
        for _ in range(self.calls):
            call()
        marks[1].record()
        marks[1].synchronize()
        return {"us": 1e3 * marks[0].elapsed_time(marks[1]) / self.calls}


def main(commit: str, calls: int, folder: str) -> None:
    rank = Rank(commit, calls, folder)
    for line in sys.stdin:
        command, _, rest = line.strip().partition(" ")
        answer = getattr(rank, command)(*([rest] if rest else []))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "")

"""A problem on random operands, as the tuner runs it: any plan of it as a call to be timed.

Layout "nt" is an operation of forward, with FP8 operands of backward too. "nn" is one half of a
layer's backward, so the whole backward is run, as `nn.linear_passes` does it: where the
communication hides is part of what is chosen.

| problem | backward of | calls |
| --- | --- | --- |
| gemm_rs nn | column layer | gather of x, dgrad with its scatter, wgrad, sum of dx |
| ag_gemm nn | row layer | dgrad with the gather of dy, wgrad on the gathered dy |
| gemm_ar nn | column layer of whole tokens | dgrad, wgrad beside the all-reduce of dx |
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from flux_megatron.kernels.sizes import cdiv
from flux_megatron.overlap import calls, low_latency, registry
from flux_megatron.overlap.transfer import GATHER, SCATTER, WORDS
from flux_megatron.problem import Plan, Problem
from flux_megatron.scaling import E4M3, Scaling, result_dtype
from flux_megatron.symm.channel import Channel
from flux_megatron.symm.word_channel import WordChannel
from flux_megatron.symm.workspace import Workspace
from flux_megatron.wgrad import accumulate_wgrad_by_torch

WGRAD_ROWS = 64  # of the weight's gradient that are compared: each sums over all rows of x and dy
LARGEST_TILE = 256  # rows or columns: some strategies send whole tiles
# Of a wait for another rank: all come to a plan together, but for the time in which each compiles
# it, and one that hangs is one plan less. The group's own bound is 480 s with torch's default.
WAIT_S = 60.0
TOLERANCE = 0.25  # of the root mean square: a stale tile is off by 1 and more, rounding by 0.05
# Strategies beside which the host's work counts in a race. This one has a collective a band, for
# which a GPU may wait: a step that its host holds up loses their work, and gains no GPU's time.
# Chosen by GPUs alone, plans of up to 16 bands took a step of 139 ms to 199 (Qwen3-14B, 6 layers,
# M = 4096, TP 2 over host memory, 2 x H200, 2026-11-30, h200x2/checks.jsonl).
BY_HOST = ("signalled",)


class Trial:
    """Operands of one problem on this rank: `renew`, `rehearse` and `learn` before anything else.

    Calls run in a workspace of the trial's own. A plan that fails may leave that unusable: `renew`
    it.
    """

    def __init__(self, problem: Problem, group: ProcessGroup, device: torch.device) -> None:
        self.problem, self.group, self.device = problem, group, device
        self._spaces: list[Workspace] = []  # the one in use, if any
        self._random = torch.Generator(device).manual_seed(1 + group.rank())  # not the caller's
        N, K = problem.N_local, problem.K_local
        self._x = self.random(problem.x_rows, K)
        self._w = self.random(*((N, K) if problem.layout == "nt" else (K, N)))
        self._scaling = None
        if problem.scaled:
            self._w = self._w.to(E4M3)  # of gradients x alone is in e5m2
            one, out_dtype = torch.ones(1, device=device), getattr(torch, problem.out_dtype)
            self._scaling = Scaling(one, one, out_dtype, problem.split_accumulator)
        if problem.is_backward:
            rows = problem.M_shard if problem.spec.scatters else problem.M
            self._layer_x = self.random(rows, N)
            self._main_grad = torch.zeros(K, N, dtype=torch.float32, device=device)

    def random(self, *shape: int) -> Tensor:
        dtype = getattr(torch, self.problem.dtype)
        drawn = torch.bfloat16 if dtype.itemsize == 1 else dtype  # nobody draws FP8
        values = torch.randn(shape, dtype=drawn, device=self.device, generator=self._random)
        return values.to(dtype)

    def learn(self) -> None:
        """What the plans must give. Collective."""
        self._expected = self.outputs(Plan("sequential"))

    def renew(self) -> None:
        """Take a new workspace, large enough for every call. Collective, and it fails on all ranks
        alike.

        A call that made it grow, while another rank fails before it gets there, would hang.
        """
        self.close()
        self._space = Workspace(self.group, self.device, WAIT_S)
        self._spaces.append(self._space)
        if self._space.shares_memory:
            self.reserve(self._space)

    def close(self) -> None:
        """Give the workspace's memory back."""
        for space in self._spaces:
            space.close()
        self._spaces.clear()

    def reserve(self, space: Workspace) -> None:
        p, element = self.problem, result_dtype(self._x, self._scaling).itemsize
        if p.spec.gathers:
            _reserve(space, GATHER, p.M * p.K * self._x.element_size())
        else:
            rows = _whole_tiles(cdiv(p.M, p.world_size))  # the last rank may have fewer
            for channel in (GATHER, SCATTER):
                _reserve(space, channel, p.world_size * rows * _whole_tiles(p.N) * element)
        words = space.missing is None and p.pattern in low_latency.BUILDERS
        if words and low_latency.supports(p) is None:
            _reserve(space, WORDS, low_latency.words_bytes(p), WordChannel)

    def rehearse(self) -> None:
        """Take the memory of `sequential` once, without the other ranks: a rank that has too little
        says so here, not when others are in its collectives.
        """
        self._space.alone = True
        try:
            self.outputs(Plan("sequential"))
        finally:
            self._space.alone = False

    def call(self, plan: Plan) -> Callable[[], Tensor]:
        """The forward operation, or the whole backward; gives y or dx."""
        problem, consume = self.problem, None
        if problem.is_backward and problem.spec.scatters:
            return lambda: self._column_backward(plan)
        if problem.is_backward and not problem.spec.gathers:
            return lambda: self._all_reduced_backward(plan)
        if problem.is_backward:
            consume = self._wgrad
        build = registry.strategy(problem, plan.strategy).BUILDERS[problem.pattern]
        given = build, self._x, self._w, None, problem.layout, plan, self._space, consume
        return lambda: calls.whole(*given, self._scaling)

    def outputs(self, plan: Plan) -> list[Tensor]:
        if not self.problem.is_backward:
            return [self.call(plan)()]
        self._main_grad.zero_()
        return [self.call(plan)(), self._main_grad[:WGRAD_ROWS].clone()]

    def verified(self, plan: Plan) -> Callable[[], None]:
        """`call`, compared with what `sequential` gives; `ArithmeticError` where it differs."""

        def check() -> None:
            outputs = self.outputs(plan)
            self.check()
            for name, given, expected in zip(("y", "dw"), outputs, self._expected, strict=False):
                limit = TOLERANCE * expected.float().square().mean().sqrt()
                error = (given.float() - expected.float()).abs().max()
                if not error <= limit:  # NaN too
                    raise ArithmeticError(
                        f"{name} differs by up to {error:.3g} from that of sequential, "
                        f"less than {limit:.3g} expected"
                    )

        return check

    def check(self) -> None:
        """Raise `SignalTimeout` if a call has missed a rank."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._space.check()

    def _column_backward(self, plan: Plan) -> Tensor:
        build, gather_plan = registry.gather_beside(plan)
        gather = calls.start_gather(build, self._layer_x, gather_plan, self._space)
        scatter = self._started(plan)
        accumulate_wgrad_by_torch(self._main_grad, self._x, gather.complete())
        gather.close()
        dx: Tensor = scatter.finish()
        return dx

    def _all_reduced_backward(self, plan: Plan) -> Tensor:
        reduction = self._started(plan)
        self._wgrad(self._x)
        dx: Tensor = reduction.finish()
        return dx

    def _started(self, plan: Plan) -> calls.InFlight:
        build = registry.strategy(self.problem, plan.strategy).BUILDERS[self.problem.pattern]
        return calls.start(build, self._x, self._w, "nn", plan, self._space)

    def _wgrad(self, gathered_dy: Tensor) -> None:
        accumulate_wgrad_by_torch(self._main_grad, gathered_dy, self._layer_x)


def _whole_tiles(size: int) -> int:
    return -(-size // LARGEST_TILE) * LARGEST_TILE


def _reserve(
    space: Workspace, channel: str, size_bytes: int, kind: type[Channel] = Channel
) -> None:
    space.end(space.begin(channel, size_bytes, kind))

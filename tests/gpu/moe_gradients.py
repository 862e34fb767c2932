"""Ways to add the weight gradients of one linear of experts to fp32 main_grads, for `moe_layer.py`.

    hooks    the library's grouped GEMM, then one addition a parameter: Megatron's hooks without
             `gradient_accumulation_fusion`
    added    what `--flux-experts` does with it
    direct   the portable kernel, which adds its sums itself

main_grads lie as DistributedDataParallel has them: in reverse, the other linear's between them.
Verified first: all against the library's dw, within its rounding to bf16, and nothing else written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gpu_run import Run
from torch import Tensor

from flux_megatron.expert_parallel.wgrad import add_weight_gradient, weight_gradient
from flux_megatron.kernels.expert_weights import ExpertWeights
from flux_megatron.kernels.expert_wgrad import expert_wgrad
from flux_megatron.tuning.timing import race

BF16_ROUNDING = 2**-7  # of dw, as a part of the largest


def measure(run: Run, model: Any, rounds: int) -> None:
    """dw of the first linear, [2 ffn, hidden] an expert, of evenly routed rows."""
    if not run.time_left():
        run.say("no time for gradients")
        return
    dtype, device = getattr(torch, run.about.dtype), run.device
    experts = model.experts // run.group.size()
    rows, N, K = model.tokens * model.topk, 2 * model.ffn, model.hidden
    dy, x = (torch.randn(rows, n, device=device).to(dtype) for n in (N, K))
    received = torch.full((1, experts), rows // experts, dtype=torch.int32, device=device)
    ends = received.sum(0).cumsum(0).to(torch.int32)
    between = model.ffn * model.hidden // K  # rows of the other linear
    memory = torch.zeros(experts, N + between, K, device=device)
    into = ExpertWeights(memory[:, :N], True)

    def hooks() -> None:
        for expert, dw in enumerate(weight_gradient(dy, x, received).unbind(0)):
            into.of(expert).add_(dw)

    ways: dict[str, Callable[[], Any]] = {
        "hooks": hooks,
        "added": lambda: add_weight_gradient(into, dy, x, received),
        "direct": lambda: expert_wgrad(dy, x, ends, into),
    }
    right = weight_gradient(dy, x, received)
    for name, way in ways.items():
        memory.zero_()
        way()
        worst = largest(into, right, memory[:, N:])
        assert worst <= BF16_ROUNDING, f"{name}: {worst:.3g} of the largest gradient is wrong"
    found = race(ways, group=run.group, device=device, rounds=rounds)
    run.row(
        "moe_gradients", model=model.name, experts=experts, rows=rows, N=N, K=K,
        times_us=found.times_us, failures=found.failures,
    )  # fmt: skip
    cells = "  ".join(f"{name} {found.median_us(name) / 1e3:.3f}" for name in found.times_us)
    run.say(f"{model.name:8} dw of fc1 into main_grad, ms  {cells}")
    for name, why in found.failures.items():
        run.say(f"  {name} failed: {why[:300]}")


def largest(into: ExpertWeights, right: Tensor, between: Tensor) -> float:
    """The largest difference, as a part of the largest gradient; infinite if others are written."""
    if between.any():
        return float("inf")
    differences = [(into.of(e) - dw).abs().max() for e, dw in enumerate(right.float())]
    return float(torch.stack(differences).max() / right.abs().max())

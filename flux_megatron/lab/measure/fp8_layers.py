"""TransformerEngine's FP8 layers, forward and backward: without overlap, by userbuffers, by ours.

    UB_SKIPMC=1 torchrun --nproc-per-node=2 -m flux_megatron.lab.measure.fp8_layers out.jsonl \
        --commit COMMIT

A case is a model's MLP: LayerNormLinear [hidden -> ffn] and Linear [ffn -> hidden], both with
sequence parallelism, one step of a micro-batch whose weights are quantized already. `alone` is the
same on all rows without communication. All arms have the same weights and input; ours is first
compared with `te`: what the first layer gives, y, dx, and the weights' gradients, whose GEMMs TE
makes of what we gathered. For that every second layer is given what `te`'s first layer gave: where
the last bit of bf16 differs, FP8 may differ by 12 %.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformer_engine.pytorch as te
import typer
from torch import Tensor
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.module import base

from flux_megatron.integration import te_overlap
from flux_megatron.lab.measure import gpu_run
from flux_megatron.lab.measure.gpu_run import Run
from flux_megatron.tuning.timing import race

CASES = "gpt3-175b 12288 49152,llama2-70b 8192 28672,llama3-8b 4096 14336"
RECIPES = {
    "current": partial(recipes.Float8CurrentScaling, fp8_format=recipes.Format.HYBRID),
    "delayed": partial(recipes.DelayedScaling, fp8_format=recipes.Format.HYBRID),
}
NAMES = ("fc1_fprop", "fc1_dgrad", "fc1_wgrad", "fc2_fprop", "fc2_dgrad", "fc2_wgrad")
# Of the norm: bf16 rounds by 1e-3 of a value in the mean, and FP8 made of such values by more.
CLOSE = 5e-3


class Mlp:
    """One arm's layers, its input and what comes back."""

    def __init__(self, run: Run, hidden: int, ffn: int, M: int, recipe: Any, **overlap: bool):
        torch.manual_seed(1)
        R = run.group.size()
        self.recipe, self.first = recipe, True
        parallel: dict[str, Any] = {"params_dtype": torch.bfloat16, "bias": False}
        modes: tuple[dict, dict] = ({}, {})
        if overlap.pop("alone", False):
            columns, rows = ffn // R, M
        else:
            columns, rows = ffn, M // R
            parallel |= {"tp_group": run.group, "tp_size": R, "sequence_parallel": True}
            own = {"ub_overlap_ag": True} if overlap else {}
            scatters = {"ub_overlap_rs": True} if overlap else {}
            modes = (
                {"parallel_mode": "column", "ub_name": "fc1", **own, **overlap},
                {"parallel_mode": "row", "ub_name": "fc2", **own, **scatters},
            )
        self.fc1 = te.LayerNormLinear(hidden, columns, **parallel, **modes[0])
        self.fc2 = te.Linear(columns, hidden, **parallel, **modes[1])
        torch.manual_seed(2 + run.group.rank())
        for layer, scale in ((self.fc1, hidden), (self.fc2, ffn)):
            layer.weight.data.normal_(std=scale**-0.5)
        self.x = torch.randn(rows, hidden, device=run.device, dtype=torch.bfloat16)
        self.dy = torch.randn_like(self.x)
        self.x.requires_grad_()

    def step(self, given: Tensor | None = None) -> list[Tensor]:
        """What the first layer gives, y, dx, dw1, dw2. The second layer takes `given` if it is."""
        weights = self.fc1.weight, self.fc2.weight
        for tensor in (self.x, *weights):
            tensor.grad = None
        with te.fp8_autocast(enabled=True, fp8_recipe=self.recipe):
            hidden = self.fc1(self.x, is_first_microbatch=self.first)
            second = hidden if given is None else given.clone().requires_grad_()
            y = self.fc2(second, is_first_microbatch=self.first)
        y.backward(self.dy)
        if given is not None:
            hidden.backward(second.grad)
        self.first = False
        return [hidden.detach(), y.detach(), self.x.grad, *(w.grad for w in weights)]


def differences(run: Run, ours: list[Tensor], others: list[Tensor]) -> list[float]:
    """The norm of each difference, by that of the second; the largest of all ranks."""
    pairs = zip(ours, others, strict=True)
    found = [(a.float() - b.float()).norm() / b.float().norm() for a, b in pairs]
    return run.slowest(torch.stack(found)).tolist()


def arms(
    run: Run, made: Callable[..., Mlp], userbuffers: dict[Any, Any]
) -> dict[str, Callable[..., Any]]:
    plain, alone = made(), made(alone=True)
    ours = made(ub_overlap_rs_dgrad=True)
    calls: dict[str, Callable[..., Any]]
    calls = {"te": plain.step, "alone": alone.step, "ours": ours.step}
    if userbuffers:
        bulk = made(ub_bulk_dgrad=True, ub_bulk_wgrad=True)

        def by_userbuffers(*given: Tensor) -> Any:
            before, base._ub_communicators = base._ub_communicators, userbuffers
            try:
                return bulk.step(*given)
            finally:
                base._ub_communicators = before

        calls["userbuffers"] = by_userbuffers
    return calls


def measure(
    run: Run, case: str, M: int, recipe: str, rounds: int, with_te: bool, beside: bool
) -> bool:
    name, hidden, ffn = case.split()
    sizes = int(hidden), int(ffn), M, RECIPES[recipe]()
    userbuffers = {}
    if with_te:
        _REAL(
            [M, int(hidden)], run.group.size(), bootstrap_backend="nccl",
            quantization_modes=[base.UserBufferQuantizationMode.FP8],
        )  # fmt: skip
        userbuffers = base._ub_communicators
    base.initialize_ub()
    calls = arms(run, partial(Mlp, run, *sizes), userbuffers)
    given = calls["te"]()[0].clone()
    results = {
        arm_: [[one.clone() for one in call(given)] for _ in range(2)][1]  # of quantized weights
        for arm_, call in calls.items() if arm_ != "alone"
    }  # fmt: skip
    found = {arm_: differences(run, results[arm_], results["te"]) for arm_ in results}
    wrong = not max(found["ours"]) <= CLOSE
    run.say(f"{'WRONG' if wrong else 'right'} {case} M {M} {recipe}: h y dx dw1 dw2 {found}")
    del given, results
    result = race(calls, group=run.group, device=run.device, rounds=rounds, beside=beside)
    us = {one: result.median_us(one) for one in result.times_us}
    for one, time in us.items():
        E = round((us["te"] - time) / (us["te"] - us["alone"]), 3)
        run.row(
            "fp8_layers", case=name, M=M, hidden=int(hidden), ffn=int(ffn), recipe=recipe,
            beside=beside, candidate=one, median_us=round(time, 1), E=E, differences=found.get(one),
            times_us=[round(each, 1) for each in result.times_us[one]],
        )  # fmt: skip
        run.say(f"  {name} M {M} {recipe} {one:12} {time:.0f} us E {E} {us['te'] / time:.3f} x")
    run.say(str(result.failures)) if result.failures else None
    base._ub_communicators = None
    return not wrong and not result.failures


_REAL = base.initialize_ub


def main(
    out: Path, commit: str = "", cases: str = CASES, rows: str = "8192,2048",
    recipe: str = "current,delayed", rounds: int = 10, seconds: float = 85,
    userbuffers: bool = True, beside: bool = False,
) -> None:  # fmt: skip
    """Be one of the ranks. One case after the other, until `seconds` are over."""
    run = gpu_run.start_on("cuda", out, commit, seconds)
    te_overlap.use(lambda: run.group)
    right = True
    for name in recipe.split(","):
        for M in map(int, rows.split(",")):
            for case in cases.split(","):
                if run.time_left():
                    right = measure(run, case, M, name, rounds, userbuffers, beside) and right
    gpu_run.finish(run, 0 if right else 1)


if __name__ == "__main__":
    typer.run(main)

"""TransformerEngine's FP8 layers, forward and backward: without overlap, by userbuffers, by ours.

    UB_SKIPMC=1 torchrun --nproc-per-node=2 -m flux_megatron.lab.measure.fp8_layers out.jsonl \
        --commit COMMIT

A case is a model's MLP: LayerNormLinear [hidden -> ffn] and Linear [ffn -> hidden], both with
sequence parallelism, one step of a micro-batch whose weights are quantized already. `alone` is the
same on all rows without communication. All arms have the same weights and input; ours is first
compared with `te`: what the first layer gives, y, dx, and the weights' gradients, whose GEMMs TE
makes of what we gathered. For that every second layer is given what `te`'s first layer gave: where
the last bit of bf16 differs, FP8 may differ by 12 %. `host_us` is what a step takes the host, which
bounds the time of small layers. `--graphs` replays steps from CUDA graphs too, without userbuffers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformer_engine.pytorch as te
import typer
from torch import Tensor
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.module import base

from flux_megatron.integration import fp8
from flux_megatron.lab.measure import gpu_run
from flux_megatron.lab.measure.gpu_run import Run

CASES = "gpt3-175b 12288 49152,llama2-70b 8192 28672,llama3-8b 4096 14336"
RECIPES = {
    "current": partial(recipes.Float8CurrentScaling, fp8_format=recipes.Format.HYBRID),
    "delayed": partial(recipes.DelayedScaling, fp8_format=recipes.Format.HYBRID),
    "blockwise": partial(recipes.Float8BlockScaling, fp8_format=recipes.Format.HYBRID),
}
# Of the norm: bf16 rounds by 1e-3 of a value in the mean, and FP8 made of such values by more.
CLOSE = 5e-3
HOST_STEPS = 20
GRAPH = "_graph"
WARM_UP = 3  # steps before a capture


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
            on = dict.fromkeys(("ub_overlap_ag", "ub_overlap_rs") if overlap else (), True)
            both = {"ub_overlap_ag": True, **overlap} if overlap else {}
            modes = (
                {"parallel_mode": "column", "ub_name": "fc1", **both},
                {"parallel_mode": "row", "ub_name": "fc2", **on},
            )
        self.fc1 = te.LayerNormLinear(hidden, columns, **parallel, **modes[0])
        self.fc2 = te.Linear(columns, hidden, **parallel, **modes[1])
        torch.manual_seed(2 + run.group.rank())
        for layer, scale in ((self.fc1, hidden), (self.fc2, ffn)):
            layer.weight.data.normal_(std=scale**-0.5)
        self.x = torch.randn(rows, hidden, device=run.device, dtype=torch.bfloat16)
        self.dy = torch.randn_like(self.x)
        self.x.requires_grad_()

    def ask(self) -> Mlp:
        """For overlap, which our operations give."""
        for name, layer in (("fc1", self.fc1), ("fc2", self.fc2)):
            vars(layer).update(fp8.asking(layer, name))
        return self

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


def host_us(run: Run, call: Callable[[], object]) -> float:
    """The median of steps that begin with an idle GPU, of the slowest rank."""
    took = []
    for _ in range(HOST_STEPS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        took.append(1e6 * (time.perf_counter() - begin))
    torch.cuda.synchronize()
    return round(run.slowest(torch.tensor([statistics.median(took)], device=run.device)).item(), 1)


def bounds(name: str, us: Mapping[str, float]) -> tuple[float, float]:
    kind = GRAPH if name.endswith(GRAPH) else ""
    return us["te" + kind], us["alone" + kind]


def captured(step: Callable[[], object]) -> Callable[[], None]:
    """The step as a CUDA graph."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        step()
    return graph.replay


def measure(
    run: Run, case: str, M: int, recipe: str, rounds: int, with_te: bool, beside: bool,
    graphs: bool = False,
) -> bool:  # fmt: skip
    name, hidden, ffn = case.split()
    sizes = int(hidden), int(ffn), M, RECIPES[recipe]()
    userbuffers = {}
    if with_te and recipe != "blockwise":  # whose operands userbuffers do not take
        base.initialize_ub(
            [M, int(hidden)], run.group.size(), bootstrap_backend="nccl",
            quantization_modes=[base.UserBufferQuantizationMode.FP8],
        )  # fmt: skip
        userbuffers = base._ub_communicators
    made = partial(Mlp, run, *sizes)
    calls: dict[str, Callable[..., Any]] = {
        "te": made().step, "alone": made(alone=True).step, "ours": made().ask().step,
    }  # fmt: skip
    if userbuffers:
        bulk = made(ub_bulk_dgrad=True, ub_bulk_wgrad=True)

        def by_userbuffers(*given: Tensor) -> Any:
            before, base._ub_communicators = base._ub_communicators, userbuffers
            try:
                return bulk.step(*given)
            finally:
                base._ub_communicators = before

        calls["userbuffers"] = by_userbuffers
    given = calls["te"]()[0].clone()
    results = {
        arm_: [[one.clone() for one in call(given)] for _ in range(2)][1]  # of quantized weights
        for arm_, call in calls.items() if arm_ != "alone"
    }  # fmt: skip
    found = {arm_: differences(run, results[arm_], results["te"]) for arm_ in results}
    wrong = not max(found["ours"]) <= CLOSE
    run.say(f"{'WRONG' if wrong else 'right'} {case} M {M} {recipe}: h y dx dw1 dw2 {found}")
    del given, results
    if graphs:
        calls |= {arm_ + GRAPH: captured(calls[arm_]) for arm_ in ("te", "alone", "ours")}
    host = {arm_: host_us(run, call) for arm_, call in calls.items()}
    run.say(f"  host_us {host}")
    columns = {"case": name, "M": M, "hidden": int(hidden), "ffn": int(ffn), "recipe": recipe}
    good = gpu_run.race_rows(
        run, "fp8_layers", calls, rounds, beside,
        bounds,
        lambda one: {
            **columns, "candidate": one, "differences": found.get(one), "host_us": host[one],
        },
    )  # fmt: skip
    base._ub_communicators = None
    return good and not wrong


def main(
    out: Path, commit: str = "", cases: str = CASES, rows: str = "8192,2048",
    recipe: str = "current,delayed", rounds: int = 10, seconds: float = 85,
    userbuffers: bool = True, beside: bool = False, graphs: bool = False,
) -> None:  # fmt: skip
    """Be one of the ranks."""
    run = gpu_run.start_on("cuda", out, commit, seconds)
    given = product(recipe.split(","), map(int, rows.split(",")), cases.split(","))
    gpu_run.measure_each(
        run, given,
        lambda one: measure(run, one[2], one[1], one[0], rounds, userbuffers, beside, graphs),
    )  # fmt: skip


if __name__ == "__main__":
    typer.run(main)

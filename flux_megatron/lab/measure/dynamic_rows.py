"""Another number of tokens in every micro-batch, as with packed sequences: ours beside NCCL.

    torchrun --nproc-per-node=2 -m flux_megatron.lab.measure.dynamic_rows out.jsonl --commit COMMIT
    torchrun --nproc-per-node=2 -m flux_megatron.lab.measure.dynamic_rows out.jsonl --repeat \
        --beside
    TRITON_INTERPRET=1 torchrun \
        --nproc-per-node=2 -m flux_megatron.lab.measure.dynamic_rows out.jsonl --device cpu

A case is a kind of call and a model. `ops` calls the operations of a layer's four linears, forward;
`nn` calls the modules of `flux_megatron.nn`, forward and backward. Both are verified on small
integers, every bit, and called once with the largest M. Then each micro-batch has a new M; layers
are called one after the other, ours and NCCL's in turn, and the slowest rank counts. A row a case:
the ratio is NCCL's time by ours. `--repeat` keeps one M.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import triton
import typer

from flux_megatron.lab.bench import operations
from flux_megatron.lab.measure import gpu_run
from flux_megatron.lab.measure.dynamic_layers import MODELS, Layer
from flux_megatron.lab.measure.gpu_run import Run
from flux_megatron.overlap.report import report, reset_report
from flux_megatron.tuning.beside import Load

CASES = "ops qwen3-32b,nn qwen3-32b,nn qwen3-8b"
SMALL = "ops small,nn small"
LEAST, LARGEST, LAYERS = 2048, 16384, 8
SMALL_LEAST, SMALL_LARGEST, SMALL_LAYERS = 8, 96, 2
SETTLED = 5  # micro-batches: the fifth is the first that counts
SEED = 20261126


class Kernels:
    """Counts what Triton compiles, and does not load from its cache, from now on."""

    def __init__(self) -> None:
        self.compiled = 0
        triton.knobs.compilation.listener = self._note

    def _note(self, *, cache_hit: bool, **_: object) -> None:
        self.compiled += not cache_hit


def sizes(run: Run, count: int, least: int, largest: int, repeat: bool) -> list[int]:
    """The M of each micro-batch, the same on every rank: one alone, or no M twice."""
    R = run.group.size()
    drawn = random.Random(SEED).sample(range(-(-least // R) * R, largest, R), count)
    return drawn[:1] * count if repeat else drawn


def verified(run: Run, layer: Layer, M: int, name: str) -> bool:
    """Whether ours gives every bit of what NCCL's gives, of integers on all ranks."""
    made = torch.Generator(run.device).manual_seed(1 + run.group.rank())
    operations.fill(made, *layer.operands)
    layer.take(M)
    pairs = zip(layer.ours(), layer.by_nccl(), strict=True)
    total = run.slowest(torch.tensor([float((ours != right).sum()) for ours, right in pairs]))
    if total.any():
        run.say(f"{name} WRONG: {total.tolist()} of results and gradients")
    return not total.any()


def timed(
    run: Run, call: Callable[[], object], layers: int, load: Load | None
) -> tuple[float, float, float]:
    """ms of a micro-batch, ms of the host in its first layer, and 1.0 where `load` ended first."""
    run.align()
    if load is not None:
        load.start()
    begin = time.perf_counter()
    call()
    first = time.perf_counter()
    for _ in range(layers - 1):
        call()
    if run.device.type == "cuda":  # the load goes on
        torch.cuda.current_stream(run.device).synchronize()
    end = time.perf_counter()
    outlived = load is not None and load.ended()
    if load is not None:
        load.wait()
    return 1e3 * (end - begin), 1e3 * (first - begin), float(outlived)


def measure(run: Run, case: str, count: int, repeat: bool, beside: bool) -> bool:
    """Whether the case is right; only then it is timed."""
    kind, model = case.split()
    least, largest, layers = LEAST, LARGEST, LAYERS
    if model == "small":
        least, largest, layers = SMALL_LEAST, SMALL_LARGEST, SMALL_LAYERS
    reset_report()
    layer, kernels = Layer(run, MODELS[model], largest, kind == "nn"), Kernels()
    if not verified(run, layer, least, case):
        return False
    gpu_run.fill_random(*layer.operands)
    layer.take(largest)
    calls: dict[str, Callable[[], object]] = {"ours": layer.ours, "nccl": layer.by_nccl}
    alone_ms = [timed(run, call, layers, None)[0] for call in [*calls.values()] * 2]
    load = None
    if beside:  # the first calls compile
        longest_ms = run.slowest(torch.tensor(max(alone_ms[2:]))).item()
        load = Load(run.group, run.device, longest_us=1e3 * longest_ms)
    found: list[torch.Tensor] = []  # [call, value]
    Ms = sizes(run, count, least, largest, repeat)
    settled = 0
    for number, M in enumerate(Ms):
        if not run.time_left():
            break
        layer.take(M)
        order = [*calls] if number % 2 else [*calls][::-1]
        turns = {name: timed(run, calls[name], layers, load) for name in order}
        found.append(run.slowest(torch.tensor([turns[name] for name in calls])))
        if number + 1 == SETTLED:
            settled = kernels.compiled
    if len(found) < SETTLED:
        run.say(f"{case}: no row of {len(found)} micro-batches, at least {SETTLED} expected")
        return True
    late, totals = run.slowest(torch.tensor(kernels.compiled - settled)), report()
    row: dict[str, object] = {
        "case": kind, "model": model, "layers": layers, "repeat": repeat, "beside": beside,
        "micro_batches": len(found), **summary(torch.stack(found)),
        "compiled_after_5": late.item(),
        "calls": {" ".join(key): n for key, n in sorted(totals.calls.items())},
        "fallbacks": {": ".join(key): n for key, n in sorted(totals.fallbacks.items())},
        "copies": {": ".join(key): n for key, n in sorted(totals.copies.items())},
        "M": Ms[: len(found)],
    }  # fmt: skip
    run.row("dynamic_rows", **row)
    shown = ("ratio_median", "ratio_lowest", "host_ms_ours", "host_ms_nccl", "compiled_after_5")
    run.say(f"{case}, {len(found)} of {count}: { {name: row[name] for name in shown} }")
    return True


def summary(found: torch.Tensor) -> dict[str, object]:
    """Of `found` [micro-batches, (ours, NCCL), (ms, host ms, outlived)]: what is in a row. Medians
    and extremes begin with the fifth micro-batch.
    """
    late = found[SETTLED - 1 :]
    ratios = (late[:, 1, 0] / late[:, 0, 0]).tolist()
    values: dict[str, object] = {
        "ratio_median": round(statistics.median(ratios), 3), "ratio_lowest": round(min(ratios), 3)
    }  # fmt: skip
    for place, name in enumerate(("ours", "nccl")):
        ms, host_ms, _ = late[:, place].t().tolist()
        every = [[round(one, 2) for one in times] for times in found[:, place].t().tolist()]
        values[f"ms_{name}"] = round(statistics.median(ms), 3)
        values[f"host_ms_{name}"] = {
            "median": round(statistics.median(host_ms), 2), "max": round(max(host_ms), 2)
        }  # fmt: skip
        values[f"times_ms_{name}"], values[f"host_times_ms_{name}"], _ = every
    return {**values, "outlived": int(late[:, :, 2].sum())}


def main(
    out: Path, commit: str = "", device: str = "cuda", cases: str = "", count: int = 40,
    repeat: bool = False, beside: bool = False, seconds: float = 240,
) -> None:  # fmt: skip
    """Be one of the ranks."""
    run = gpu_run.start_on(device, out, commit, seconds, beside)
    given = (cases or (SMALL if device == "cpu" else CASES)).split(",")
    gpu_run.measure_each(run, given, lambda case: measure(run, case, count, repeat, beside))


if __name__ == "__main__":
    typer.run(main)

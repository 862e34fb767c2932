"""The folder of one run, and what is said of it. Torch and Triton only in ranks.

config.json  metrics.jsonl  summary.json  loss.png  data/  checkpoints/  logs/
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import IO, Any

from pydantic import ValidationError

from flux_megatron import config_files, option_values
from flux_megatron.errors import BadInput
from flux_megatron.lab.train.config import MAY_CHANGE, TrainConfig
from flux_megatron.launch import schema

CONFIG, METRICS, SUMMARY = "config.json", "metrics.jsonl", "summary.json"
OURS, STOCK = "flux", {"linewidth": 6, "alpha": 0.35}  # lines of curves
OF_A_START = {CONFIG, "data", "logs"}  # what a run leaves that has done no step


def check(config: TrainConfig, out: Path, resume: bool) -> None:
    """`BadInput` unless `config` can run in `out`: no run is overwritten, or resumed as another."""
    if not resume:
        option_values.folder("--out", out)
        if not {path.name for path in out.iterdir()} <= OF_A_START:
            raise BadInput(f"{out} is not empty: give another --out, or --resume to continue it")
        return
    old, new = recorded(out, "--resume").model_dump(mode="json"), config.model_dump(mode="json")
    if changed := config_files.differences(old, new, but=MAY_CHANGE):
        raise BadInput(f"{out} cannot be resumed with other settings: {changed}")
    latest(out)


def recorded(out: Path, option: str) -> TrainConfig:
    """What the run of `out` was started with; `BadInput` where there is none."""
    try:
        return TrainConfig.model_validate_json((out / CONFIG).read_bytes())
    except OSError as error:
        raise BadInput(
            f"{option} {out} given, the folder of a run expected ({CONFIG}: {error.strerror})"
        ) from None
    except ValidationError as error:
        raise BadInput(f"{out / CONFIG} cannot be read: {schema.said(error)}") from None


def latest(out: Path) -> Path | None:
    """The newest checkpoint of a run, or None; `BadInput` where `latest` names none."""
    pointer = out / "checkpoints" / "latest"
    if not pointer.exists():
        return None
    found = pointer.with_name(pointer.read_text().strip() or "nothing")
    if not (found / "metadata.json").is_file():
        whole = sorted(path.parent.name for path in pointer.parent.glob("step_*/metadata.json"))
        raise BadInput(f"{pointer} names {found.name}, one of {', '.join(whole)} expected")
    return found


def write_json(file: Path, content: dict[str, Any]) -> None:
    option_values.replace(file, json.dumps(content, indent=2) + "\n")


def metrics(out: Path) -> list[dict[str, Any]]:
    """One row per step. A last line without its end is what a killed run left, and is dropped."""
    file = out / METRICS
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def keep_metrics(out: Path, step: int) -> None:
    """Forget the rows after `step`: a resumed run writes them again."""
    rows = [row for row in metrics(out) if row["step"] <= step]
    option_values.replace(out / METRICS, "".join(json.dumps(row) + "\n" for row in rows))


def append_metrics(out: Path, row: dict[str, Any]) -> None:
    with (out / METRICS).open("a") as stream:
        stream.write(json.dumps(row) + "\n")


def counts_of_all_ranks(config: TrainConfig, eligible: int) -> dict[str, Any]:
    """Sums over all ranks, each of which has made `eligible` calls. Collective."""
    import torch.distributed as dist

    from flux_megatron.overlap.report import Report, report

    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, report())
    calls = sum((Counter(rank.calls) for rank in ranks), Counter())
    fallbacks = sum((Counter(rank.fallbacks) for rank in ranks), Counter())
    return counts(config, Report(calls, fallbacks, 0), eligible * len(ranks))


def counts(config: TrainConfig, found: Any, eligible: int) -> dict[str, Any]:
    """`silent`: how many of the eligible calls neither overlapped nor gave a reason. A `sequential`
    plan is a reason where plans are chosen, or where it is the run's strategy.
    """
    if config.layers != "flux" or config.parallel.tp == 1:
        eligible = 0
    silent = eligible - found.overlapped - sum(found.fallbacks.values())
    if config.strategy in ("auto", "sequential"):
        silent -= found.chosen_sequential
    return {
        "calls": {" ".join(key): n for key, n in sorted(found.calls.items())},
        "fallbacks": {": ".join(key): n for key, n in sorted(found.fallbacks.items())},
        "overlapped": found.overlapped,
        "chosen_sequential": found.chosen_sequential,
        "eligible": eligible,
        "silent": silent,
    }


def show(title: str, facts: dict[str, Any], stream: IO[str] | None = None) -> None:
    values = {name: f"{v:.6g}" if isinstance(v, float) else v for name, v in facts.items()}
    lines = [f"  {name.replace('_', ' ')}: {value}" for name, value in values.items()]
    print("\n".join([title, *lines]), file=stream, flush=True)


def draw(file: Path, curves: dict[str, list[dict[str, Any]]], title: str) -> None:
    """Write a PNG: ours as a thin line on the wide pale ones of stock runs, so that equal curves
    are both seen.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=200, layout="constrained")  # of a slide
    figure.suptitle(title, fontsize=12)
    axes = figure.subplots()
    for name in sorted(curves, key=lambda name: name == OURS):
        steps, losses = zip(*((row["step"], row["loss"]) for row in curves[name]), strict=True)
        style: Any = {"color": "black", "linewidth": 1} if name == OURS else STOCK
        axes.plot(steps, losses, label=name, marker="." if len(steps) == 1 else None, **style)
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(file)

"""The folder of one run. No torch.

config.json  metrics.jsonl  summary.json  loss.png  data/  checkpoints/  logs/
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flux_megatron import config_files, option_values
from flux_megatron.errors import BadInput
from flux_megatron.lab.train.config import MAY_CHANGE, TrainConfig
from flux_megatron.launch import schema

CONFIG, METRICS, SUMMARY = "config.json", "metrics.jsonl", "summary.json"
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

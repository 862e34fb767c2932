"""A tiny run of `flux-megatron train` as words of a command line, and as a configuration."""

from __future__ import annotations

import json
from pathlib import Path

from flux_megatron.lab.train import config

DEMO = Path(__file__).parent.parent / "configs" / "train" / "demo.yaml"
TINY = {
    "model.num_layers": 1, "model.hidden": 32, "model.heads": 4, "model.ffn": 64,
    "model.seq_length": 32, "train.micro_batch": 1, "train.global_batch": 2,
    "train.warmup_steps": 1, "train.save_every": None, "train.log_every": 1,
    "parallel.device": "cpu",
}  # fmt: skip
WORDS = " ".join(f"{i} is {i * i}." for i in range(3000))


def load(**overrides: object) -> config.TrainConfig:
    """`train__lr=0.1` sets train.lr."""
    return config.load(DEMO, TINY | {key.replace("__", "."): v for key, v in overrides.items()})


def words(out: Path, text: Path, *more: object, **settings: object) -> list[str]:
    """`train` of a tiny model on `text`, a folder that is made."""
    text.mkdir(exist_ok=True)
    (text / "words.txt").write_text(WORDS)
    line = ["train", "--config", str(DEMO), "--out", str(out), "--data", str(text), *map(str, more)]
    given = TINY | {key.replace("__", "."): value for key, value in settings.items()}
    return line + [w for key, v in given.items() for w in ("--set", f"{key}={json.dumps(v)}")]

"""What is to be generated, checked as far as it can be before any rank starts. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from flux_megatron.lab.train import run_folder
from flux_megatron.lab.train.config import BYTE_VOCAB, ConfigError, TrainConfig

REQUEST = "request.json"
MOST_PROMPTS = 64  # rows of a decoding step for which `low_latency` is chosen unmeasured

Arm = Literal["flux", "stock"]


class Request(BaseModel):
    """`arms` decode in turn; `temperature` 0 takes the likeliest token, `top_k` 0 draws from all.

    `graph`: on GPUs steps are replays of a CUDA graph.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    checkpoint: Path
    prompts: tuple[str, ...]
    tokens: int
    temperature: float = 0.0
    top_k: int = 0
    seed: int = 1234
    arms: tuple[Arm, ...] = ("flux",)
    graph: bool = True

    @property
    def compares(self) -> bool:
        return len(self.arms) > 1

    def check(self, config: TrainConfig) -> None:
        """`ConfigError` where this cannot be decoded by the model of `config`."""
        if not 1 <= len(self.prompts) <= MOST_PROMPTS:
            raise ConfigError(f"{len(self.prompts)} prompts given, 1 to {MOST_PROMPTS} expected")
        if self.tokens < 1:
            raise ConfigError(f"--tokens {self.tokens} given, 1 or more expected")
        if self.temperature < 0:
            raise ConfigError(f"--temperature {self.temperature:g} given, 0 or more expected")
        if not 0 <= self.top_k <= BYTE_VOCAB:
            raise ConfigError(f"--top-k {self.top_k} given, 0 to {BYTE_VOCAB} expected")
        if self.top_k and not self.temperature:
            raise ConfigError(f"--top-k {self.top_k} given, a --temperature above 0 expected too")
        for number, prompt in enumerate(self.prompts, 1):
            self._check_length(number, prompt, config.model.seq_length)

    def _check_length(self, number: int, prompt: str, most: int) -> None:
        try:
            length = max(1, len(prompt.encode()))  # an empty one is an end of document
        except UnicodeEncodeError as error:
            raise ConfigError(f"prompt {number} is no text: {error}") from None
        if length + self.tokens > most:
            raise ConfigError(
                f"prompt {number} of {length} tokens and --tokens {self.tokens} given, "
                f"{most} together at most expected, the model.seq_length of the checkpoint"
            )


def read_prompts(file: Path) -> tuple[str, ...]:
    """One prompt a line, an empty line too; `ConfigError` for what is no text."""
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {file} cannot be read: {error}") from None
    return tuple(text.removesuffix("\n").split("\n")) if text else ()


def trained(folder: Path, tp: int | None, device: str) -> tuple[TrainConfig, Path]:
    """How to build the model of a checkpoint on `tp` ranks, None for as many as it was trained on,
    and the folder of the checkpoint: `folder`, or the newest one of the run in `folder`.

    `ConfigError` where there is none, or `tp` does not divide the model.
    """
    run = folder if (folder / "config.json").is_file() else folder.parent.parent
    if not folder.is_dir() or not (run / "config.json").is_file():
        raise ConfigError(
            f"--checkpoint {folder} given, a folder of `flux-megatron train` (with config.json) or "
            "one of its checkpoints/step_N expected"
        )
    config = run_folder.recorded_config(run)
    path = run_folder.latest(run) if run == folder else folder
    if path is None:
        raise ConfigError(f"--checkpoint {folder} given, but {run} has no checkpoint yet")
    tp = config.parallel.tp if tp is None else tp
    parallel = {"tp": tp, "world_size": tp, "sequence_parallel": False, "device": device}
    changed = config.model_dump() | {"parallel": parallel, "strategy": "auto"}
    try:
        return TrainConfig.model_validate(changed), path
    except ValidationError as error:
        raise ConfigError(f"--tp {tp} given: {_first(error)}") from None


def _first(error: ValidationError) -> str:
    return error.errors()[0]["msg"].removeprefix("Value error, ")

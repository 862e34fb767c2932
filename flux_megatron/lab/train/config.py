"""What one training run is: YAML schema, overrides and the rules a run must keep. No torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from flux_megatron import config_files
from flux_megatron.errors import BadInput

BYTE_VOCAB = 257  # 256 bytes and the end-of-document token
VOCAB_MULTIPLE = 64

Layers = Literal["flux", "stock", "stock-rank-order", "stock-reverse-order"]
LARGEST = 2**31 - 1
Count = Field(gt=0, le=LARGEST)
LARGEST_SEED = 2**32 - 1  # that numpy takes


class ConfigError(BadInput):
    """A configuration that cannot be run; the message names the file and the key."""


class Section(BaseModel):
    """As strict as JSON: no number from a text, no integer from a boolean."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelConfig(Section):
    """A decoder-only transformer, without dropout: compared runs must not draw random numbers."""

    num_layers: int = Count
    hidden: int = Count
    heads: int = Count
    ffn: int = Count
    seq_length: int = Count
    normalization: Literal["LayerNorm", "RMSNorm"] = "RMSNorm"
    swiglu: bool = False
    bias: bool = False
    tied_embeddings: bool = True
    position_embedding: Literal["rope", "learned_absolute"] = "rope"


class ParallelConfig(Section):
    """`world_size`: all ranks; null means every GPU of this machine, or `tp` without GPUs."""

    tp: int = Field(default=2, gt=0, le=LARGEST)
    sequence_parallel: bool = True
    world_size: int | None = Field(default=None, gt=0, le=LARGEST)
    device: Literal["auto", "cpu", "cuda"] = "auto"


class DataConfig(Section):
    """`path`: a folder of text files; null means the running Python's standard library.

    `cache`: where the indexed files are kept; null means OUT/cache.
    """

    path: Path | None = Field(default=None, strict=False)
    pattern: str = "*"
    cache: Path | None = Field(default=None, strict=False)


class LoopConfig(Section):
    """`decay_steps`: of the cosine from `lr` to `min_lr`; null keeps `lr` after the warmup."""

    steps: int = Count
    micro_batch: int = Count
    global_batch: int = Count
    lr: float = Field(gt=0, allow_inf_nan=False)
    min_lr: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    warmup_steps: int = Field(default=0, ge=0, le=LARGEST)
    decay_steps: int | None = Field(default=None, gt=0, le=LARGEST)
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    clip: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    seed: int = Field(default=1234, gt=0, le=LARGEST_SEED)
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    save_every: int | None = Field(default=None, gt=0, le=LARGEST)
    log_every: int = Field(default=10, gt=0, le=LARGEST)


class TrainConfig(Section):
    """One run, on our `layers`, on Megatron's, or on Megatron's with its sums in another order."""

    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig = DataConfig()
    train: LoopConfig
    layers: Layers = "flux"
    strategy: Literal[
        "auto", "hopper", "fused", "pipelined", "low_latency", "signalled", "sequential"
    ] = "auto"

    @model_validator(mode="after")
    def _divisible(self) -> TrainConfig:
        model, tp, loop = self.model, self.parallel.tp, self.train
        _must_divide("model.hidden", model.hidden, "model.heads", model.heads)
        for name in ("heads", "hidden", "ffn"):
            _must_divide(f"model.{name}", getattr(model, name), "parallel.tp", tp)
        if self.parallel.sequence_parallel:
            _must_divide("model.seq_length", model.seq_length, "parallel.tp", tp)
        if self.parallel.world_size is not None:
            _must_divide("parallel.world_size", self.parallel.world_size, "parallel.tp", tp)
        _must_divide("train.global_batch", loop.global_batch, "train.micro_batch", loop.micro_batch)
        if loop.decay_steps is not None and loop.warmup_steps >= loop.decay_steps:
            raise ValueError(
                f"train.warmup_steps={loop.warmup_steps} must be below "
                f"train.decay_steps={loop.decay_steps}"
            )
        if loop.min_lr > loop.lr:
            raise ValueError(f"train.min_lr={loop.min_lr} must not be above train.lr={loop.lr}")
        return self

    @property
    def padded_vocab(self) -> int:
        """The byte vocabulary rounded up so that every rank gets the same whole number of rows."""
        multiple = VOCAB_MULTIPLE
        while multiple % self.parallel.tp:
            multiple += VOCAB_MULTIPLE
        return -(-BYTE_VOCAB // multiple) * multiple

    def microbatches(self, data_parallel: int) -> int:
        """Microbatches per step and rank; `ConfigError` where the batch cannot be shared out."""
        per_round = self.train.micro_batch * data_parallel
        if self.train.global_batch % per_round:
            raise ConfigError(
                f"train.global_batch={self.train.global_batch} is not a multiple of "
                f"train.micro_batch x data parallel size = {per_round}"
            )
        return self.train.global_batch // per_round

    def eligible_calls(self, steps: int, microbatches: int) -> int:
        """Calls per rank that ought to overlap in `steps` steps.

        Each of a layer's four linears, and the LM head, has a collective in its forward and one in
        its backward pass; without sequence parallelism in one of them.
        """
        if self.parallel.tp == 1:
            return 0
        each = 2 if self.parallel.sequence_parallel else 1
        return each * (4 * self.model.num_layers + 1) * steps * microbatches

    def silent_calls(self, eligible: int, counts: dict[str, Any]) -> int:
        """How many of the eligible calls neither overlapped nor gave a reason.

        A `sequential` plan is a reason where plans are chosen, or where it is the run's strategy.
        """
        accounted = counts["overlapped"] + sum(counts["fallbacks"].values())
        if self.strategy in ("auto", "sequential"):
            accounted += counts["chosen_sequential"]
        return int(eligible - accounted)


def load(
    file: Path, overrides: dict[str, Any], options: Mapping[str, str] | None = None
) -> TrainConfig:
    """The run of `file`, or of one that we ship, as "demo", with `overrides`: {"train.steps": 10}.

    `ConfigError` names what is wrong, and the option that gave it: `options` has those of keys that
    --set did not give.
    """
    try:
        raw = config_files.read(_found(file))
    except ValueError as error:
        names = ", ".join(sorted(one.stem for one in (config_files.configs() / "train").iterdir()))
        said = " ".join(str(error).split())
        raise ConfigError(
            f"--config {file}: {said}; a YAML file, or one of {names} expected"
        ) from None
    for dotted, value in overrides.items():
        _override(raw, dotted, value)
    try:
        return TrainConfig.model_validate(raw)
    except ValidationError as error:
        given = dict.fromkeys(overrides, "--set") | dict(options or {})
        said = "; ".join(_explain(item, given) for item in error.errors())
        raise ConfigError(f"{file}: {said}") from None


def _found(file: Path) -> Path:
    """The file itself, or the one that we ship by that name."""
    shipped = config_files.configs() / "train" / f"{file}.yaml"
    return shipped if not file.exists() and shipped.is_file() else file


def parse_override(text: str) -> tuple[str, Any]:
    """`model.hidden=128` -> ("model.hidden", 128), the value read as YAML."""
    try:
        return config_files.parse_override(text, example="train.lr=0.001")
    except ValueError as error:
        raise ConfigError(f"--set: {error}") from None


def _override(raw: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, key = dotted.split(".")
    for name in sections:
        raw = raw.setdefault(name, {})
        if not isinstance(raw, dict):
            raise ConfigError(f"--set {dotted}: {name!r} is not a section")
    raw[key] = value


def _explain(item: Any, options: Mapping[str, str]) -> str:
    """The key, what is expected, what is given, and by which option if not by the file."""
    key, message = ".".join(str(part) for part in item["loc"]), item["msg"]
    by = f" by {options[key]}" if key in options else ""
    if item["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, _keys(), 1)
        return f"{key}: unknown key{by}" + (f", {near[0]} expected?" if near else "")
    if not key:  # a rule of several keys, which names their values
        return str(message.removeprefix("Value error, "))
    given = "" if item["type"] == "missing" else f", {item['input']!r} given{by}"
    return f"{key}: {message}{given}"


def _keys() -> list[str]:
    found = []
    for name, field in TrainConfig.model_fields.items():
        kind = field.annotation
        inner = kind.model_fields if isinstance(kind, type) and issubclass(kind, Section) else {}
        found += [name, *(f"{name}.{key}" for key in inner)]
    return found


def _must_divide(name: str, value: int, by_name: str, by: int) -> None:
    if value % by:
        raise ValueError(f"{name}={value} must be divisible by {by_name}={by}")

"""What one training run is: the sections of a YAML file, and the rules they keep. No torch."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from flux_megatron import config_files, shipped
from flux_megatron.errors import BadInput
from flux_megatron.launch import schema
from flux_megatron.launch.workload import Count, CountFromZero, FromZero, Positive
from flux_megatron.settings import Strategy

PADDED_VOCAB = 320  # the same for all `tp`, as the loss is one over all rows

Layers = Literal["flux", "stock", "stock-rank-order", "stock-reverse-order"]
MAY_CHANGE = (
    "train.steps", "train.save_every", "train.log_every", "parallel.tp", "parallel.world_size",
)  # fmt: skip


class Section(BaseModel):
    """As strict as JSON: no number from a text, no integer from a boolean."""

    model_config = ConfigDict(extra="forbid", frozen=True, **schema.STRICT)


class ModelConfig(Section):
    """A decoder-only transformer, without dropout: a run draws no random numbers."""

    num_layers: Count
    hidden: Count
    heads: Count
    ffn: Count
    seq_length: Count
    normalization: Literal["LayerNorm", "RMSNorm"] = "RMSNorm"
    swiglu: bool = False
    bias: bool = False
    tied_embeddings: bool = True
    position_embedding: Literal["rope", "learned_absolute"] = "rope"


class ParallelConfig(Section):
    """`world_size`: all ranks; null means every GPU of this machine, or `tp` without GPUs."""

    tp: Count = 2
    sequence_parallel: bool = True
    world_size: Count | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"


class DataConfig(Section):
    """`path`: a folder of text files; null means the running Python's standard library."""

    path: Path | None = Field(default=None, strict=False)


class LoopConfig(Section):
    """`decay_steps`: of the cosine from `lr` to `min_lr`; null keeps `lr` after the warmup."""

    steps: Count
    micro_batch: Count
    global_batch: Count
    lr: Positive
    min_lr: FromZero = 0.0
    warmup_steps: CountFromZero = 0
    decay_steps: Count | None = None
    weight_decay: FromZero = 0.0
    clip: FromZero = 1.0
    seed: int = Field(default=1234, gt=0, lt=2**32)  # that numpy takes
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    save_every: Count | None = None
    log_every: Count = 10


class TrainConfig(Section):
    """One run, on our `layers`, on Megatron's, or on Megatron's with its sums in another order."""

    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig = DataConfig()
    train: LoopConfig
    layers: Layers = "flux"
    strategy: Strategy = "auto"

    @model_validator(mode="after")
    def _fits_together(self) -> TrainConfig:
        tp, loop = self.parallel.tp, self.train
        divisible = {"model.hidden": "model.heads", "train.global_batch": "train.micro_batch"}
        divisible |= dict.fromkeys(("model.heads", "model.ffn"), "parallel.tp")
        if self.parallel.sequence_parallel:
            divisible["model.seq_length"] = "parallel.tp"
        if self.parallel.world_size is not None:
            divisible["parallel.world_size"] = "parallel.tp"
        for name, by in divisible.items():
            value, divisor = attrgetter(name)(self), attrgetter(by)(self)
            if value % divisor:
                raise ValueError(f"{name}={value} must be divisible by {by}={divisor}")
        if PADDED_VOCAB % tp:
            raise ValueError(f"parallel.tp={tp} must divide the {PADDED_VOCAB} rows of embeddings")
        if loop.decay_steps is not None and loop.warmup_steps >= loop.decay_steps:
            warmup, decay = loop.warmup_steps, loop.decay_steps
            raise ValueError(f"train.warmup_steps={warmup} must be below train.decay_steps={decay}")
        if loop.min_lr > loop.lr:
            raise ValueError(f"train.min_lr={loop.min_lr} must not be above train.lr={loop.lr}")
        return self

    def microbatches(self, ranks: int) -> int:
        """Microbatches per step and rank of so many ranks; `BadInput` where the batch or the ranks
        cannot be shared out.
        """
        data_parallel, rest = divmod(ranks, self.parallel.tp)
        per_round = self.train.micro_batch * data_parallel
        if rest or self.train.global_batch % per_round:
            raise BadInput(
                f"{ranks} ranks, parallel.tp={self.parallel.tp}, train.global_batch="
                f"{self.train.global_batch} given; ranks a multiple of tp, global_batch one "
                f"of micro_batch x data parallel size = {per_round} expected"
            )
        return self.train.global_batch // per_round

    def eligible_calls(self) -> int:
        """Calls of a rank in a microbatch that ought to overlap on our layers.

        Each of a layer's four linears, and the LM head, has a collective in its forward and one in
        its backward pass; without sequence parallelism in one of them.
        """
        return (2 if self.parallel.sequence_parallel else 1) * (4 * self.model.num_layers + 1)


def load(file: Path, overrides: dict[str, Any]) -> TrainConfig:
    """The run of `file`, or of one that we ship, as "demo", with `overrides`: {"train.steps": 10}.

    `BadInput` names what is wrong.
    """
    ours = shipped.folder("configs") / "train" / f"{file}.yaml"
    try:
        values = config_files.read(ours if ours.is_file() and not file.exists() else file)
        return TrainConfig.model_validate(config_files.merge(values, overrides))
    except ValidationError as error:
        raise BadInput(f"{file}: {schema.said(error)}") from None
    except ValueError as error:
        raise BadInput(f"--config {file}: {error}; a YAML file, demo or h200 expected") from None

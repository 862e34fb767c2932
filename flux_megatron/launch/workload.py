"""Model, machine and training options: the terms of experiments and predictions.

Plain facts without torch. `launch.experiment` reads them from `configs/` and checks the rules that
hold between them; the cost model takes them as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

# what `launch.schema` holds values against: pydantic does so where it builds, and nowhere else
Count = Annotated[int, Field(gt=0, le=2**31 - 1)]
CountFromZero = Annotated[int, Field(ge=0, le=2**31 - 1)]
Positive = Annotated[float, Field(gt=0)]
FromZero = Annotated[float, Field(ge=0)]
Variable = Annotated[str, Field(pattern="^[A-Za-z_][A-Za-z0-9_]*$")]  # its name
Arm = Literal["megatron", "te", "flux"]
BYTE_VOCAB = 257  # of `flux-megatron train`: 256 bytes and the end-of-document token
FP8 = "float8_e4m3fn"
ELEMENT_BYTES = {FP8: 1, "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer. `vocab` counts tokens before Megatron pads them."""

    name: str
    layers: Count
    hidden: Count
    heads: Count
    kv_heads: Count  # query groups; equal to `heads` without grouped-query attention
    ffn: Count
    vocab: Count
    seq_length: Count
    swiglu: bool = False
    norm: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    position: Literal["learned", "rope"] = "learned"
    linear_bias: bool = True
    tied_embeddings: bool = True
    experts: CountFromZero = 0  # of each layer; 0: none

    @property
    def kv_width(self) -> int:
        """Of keys, or of values."""
        return self.kv_heads * (self.hidden // self.heads)

    @property
    def fc1_width(self) -> int:
        return self.ffn * (2 if self.swiglu else 1)


@dataclass(frozen=True)
class Link:
    """What connects the GPUs of a node; `bandwidth_gbps` is one GPU's in one direction, in GB/s. On
    `host` they reach no peer's memory, and NCCL goes through the machine's: the rate is NCCL's.
    """

    kind: Literal["nvlink", "pcie", "host", "memory"]  # memory: ranks of the CPU, emulated
    bandwidth_gbps: Positive


@dataclass(frozen=True)
class Nics:
    """A node's network cards; `bandwidth_gbps` is one card's in one direction, in GB/s."""

    count: Count
    bandwidth_gbps: Positive
    latency_us: FromZero = 5.0


@dataclass(frozen=True)
class Health:
    """What every node reaches at least, before a run starts on it; None: not examined."""

    allreduce_gbps: Positive | None = None  # bus bandwidth of NCCL's all-reduce over a node's GPUs
    sm_mhz: Count | None = None  # SM clock under GEMMs


@dataclass(frozen=True)
class Cluster:
    """Equal nodes. `gpu` names an entry of `lab.perf.hardware`, or "cpu".

    `environment` are variables of every rank, such as NCCL's for this network. Nothing is predicted
    from them, nor from `health`.
    """

    name: str
    gpu: str
    nodes: Count
    gpus_per_node: Count
    memory_gib: Positive  # of one GPU; of the machine for "cpu"
    link: Link
    nics: Nics | None = None  # None: a single node
    health: Health = Health()
    environment: Mapping[Variable, str] = field(default_factory=dict, hash=False)

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True)
class Parallel:
    """Degrees of tensor, pipeline and data parallelism; `virtual_stages` > 1 interleaves."""

    tp: Count
    pp: Count = 1
    dp: Count = 1
    virtual_stages: Count = 1
    sequence_parallel: bool = True

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp


@dataclass(frozen=True)
class Training:
    """One step and how many of them. Batches count sequences."""

    micro_batch: Count
    global_batch: Count
    steps: Count
    warmup_steps: CountFromZero  # dropped from every time
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    recompute: Literal["none", "selective", "full"] = "none"
    flash_attention: bool = True
    distributed_optimizer: bool = True
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    lr: Positive = 1e-4
    seed: CountFromZero = 1234
    # the recipe of TransformerEngine's linear layers, with one scale a tensor
    fp8: Literal["none", "tensorwise", "delayed"] = "none"


@dataclass(frozen=True)
class Workload:
    """One arm of an experiment: what runs on every GPU of the cluster."""

    model: Model
    cluster: Cluster
    parallel: Parallel
    training: Training
    arm: Arm

    @property
    def tokens(self) -> int:
        """M of every linear layer: rows of one micro-batch."""
        return self.model.seq_length * self.training.micro_batch

    @property
    def gathered_bytes(self) -> int:
        """Of one matrix [M, hidden]."""
        return self.tokens * self.model.hidden * ELEMENT_BYTES[self.training.dtype]

    @property
    def padded_vocab(self) -> int:
        """Megatron pads the vocabulary to a multiple of 128 on every tensor-parallel rank."""
        multiple = 128 * self.parallel.tp
        return -(-self.model.vocab // multiple) * multiple

    @property
    def micro_batches(self) -> int:
        """Of one step and pipeline."""
        return self.training.global_batch // (self.training.micro_batch * self.parallel.dp)

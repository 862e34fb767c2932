"""Model, machine and training options: the terms of experiments and predictions.

Plain facts without torch. `launch.experiment` reads them from `configs/` and checks the rules that
hold between them; the cost model takes them as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Arm = Literal["megatron", "te", "flux"]
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class Moe:
    """Experts in place of each layer's MLP, of which every token takes `topk`. `imbalance`: rows of
    the busiest expert-parallel rank over the mean; `host_sync`: whether Megatron's dispatcher waits
    for the splits on the host.
    """

    experts: int
    topk: int
    imbalance: float
    host_sync: bool


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer. `vocab` counts tokens before Megatron pads them."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int  # query groups; equal to `heads` without grouped-query attention
    ffn: int
    vocab: int
    seq_length: int
    swiglu: bool = False
    norm: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    position: Literal["learned", "rope"] = "learned"
    linear_bias: bool = True
    tied_embeddings: bool = True
    moe: Moe | None = None


@dataclass(frozen=True)
class Link:
    """What connects the GPUs of a node; `bandwidth_gbps` is one GPU's in one direction, in GB/s."""

    kind: Literal["nvlink", "pcie", "memory"]  # memory: emulated ranks of one CPU machine
    bandwidth_gbps: float


@dataclass(frozen=True)
class Nics:
    """A node's network cards; `bandwidth_gbps` is one card's in one direction, in GB/s."""

    count: int
    bandwidth_gbps: float
    latency_us: float = 5.0


@dataclass(frozen=True)
class Health:
    """What every node reaches at least, before a run starts on it; None: not examined."""

    allreduce_gbps: float | None = None  # bus bandwidth of NCCL's all-reduce over a node's GPUs
    sm_mhz: int | None = None  # SM clock under GEMMs


@dataclass(frozen=True)
class Cluster:
    """Equal nodes. `gpu` names an entry of `lab.perf.hardware`, or "cpu".

    `environment` are variables of every rank, such as NCCL's for this network. Nothing is predicted
    from them, nor from `health`.
    """

    name: str
    gpu: str
    nodes: int
    gpus_per_node: int
    numa_nodes: int
    memory_gib: float  # of one GPU; of the machine for "cpu"
    link: Link
    nics: Nics | None = None  # None: a single node
    health: Health = Health()
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True)
class Parallel:
    """Degrees of tensor, pipeline and data parallelism; `virtual_stages` > 1 interleaves. `ep` of
    the replicas, neighbours, share a model's experts.
    """

    tp: int
    pp: int = 1
    dp: int = 1
    virtual_stages: int = 1
    sequence_parallel: bool = True
    ep: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp


@dataclass(frozen=True)
class Training:
    """One step and how many of them. Batches count sequences."""

    micro_batch: int
    global_batch: int
    steps: int
    warmup_steps: int  # dropped from every time
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    recompute: Literal["none", "selective", "full"] = "none"
    flash_attention: bool = True
    distributed_optimizer: bool = True
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    lr: float = 1e-4
    seed: int = 1234


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
    def padded_vocab(self) -> int:
        """Megatron pads the vocabulary to a multiple of 128 on every tensor-parallel rank."""
        multiple = 128 * self.parallel.tp
        return -(-self.model.vocab // multiple) * multiple

    @property
    def moe(self) -> Moe:
        assert self.model.moe is not None, "a model with experts"
        return self.model.moe

    @property
    def expert_rows(self) -> float:
        """That the experts of the busiest GPU get of one micro-batch on all GPUs."""
        imbalance = self.moe.imbalance if self.parallel.ep > 1 else 1.0
        return self.tokens * self.moe.topk * imbalance

    @property
    def micro_batches(self) -> int:
        """Of one step and pipeline."""
        return self.training.global_batch // (self.training.micro_batch * self.parallel.dp)

"""Workloads and costs that the tests of the step simulator share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flux_megatron.lab.perf.schedule import Costs
from flux_megatron.launch.workload import Cluster, Link, Model, Nics, Parallel, Training, Workload

GPT3 = Model(
    "gpt3-175b", layers=96, hidden=12288, heads=96, kv_heads=96, ffn=49152, vocab=50257,
    seq_length=2048,
)  # fmt: skip
LLAMA = Model(
    "llama2-70b", layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=32000,
    seq_length=4096, swiglu=True, norm="RMSNorm", position="rope", linear_bias=False,
    tied_embeddings=False,
)  # fmt: skip
A100 = Cluster(
    "a100", "A100-SXM4-80GB", nodes=16, gpus_per_node=8, memory_gib=80.0,
    link=Link("nvlink", 300.0), nics=Nics(4, 25.0),
)  # fmt: skip
WORKLOAD = Workload(
    GPT3, A100, Parallel(tp=8, pp=8, dp=2), Training(2, 1536, steps=30, warmup_steps=10), "megatron"
)


def with_(workload: Workload, part: str, **changes: object) -> Workload:
    return replace(workload, **{part: replace(getattr(workload, part), **changes)})


def uniform(pp: int, micro_batches: int, forward: float, backward: float, **others: Any) -> Costs:
    """Ranks that all cost the same, without sends, replicas and optimizer unless they are given."""
    chunks = others.pop("chunks", 1)
    nothing = tuple(((),) * chunks for _ in range(pp))
    values = {
        "micro_batches": micro_batches,
        "forward_us": ((forward,) * chunks,) * pp,
        "backward_us": ((backward,) * chunks,) * pp,
        "send_us": (others.pop("send", 0.0),) * pp,
        "reduce_us": nothing,
        "gather_us": nothing,
        "optimizer_us": (0.0,) * pp,
    }
    return Costs(**(values | others))

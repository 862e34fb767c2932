"""Published training runs beside the predictions of the simulator.

Nothing is fitted to them. Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models" (arXiv 2205.05198): Table 3 has the configurations, Table 5 the seconds of an
iteration on Selene, 8 x A100 80 GB and 8 HDR cards a node, with and without their techniques. The
same table is in Megatron-LM's README as MFU (41.5, 51.4, 56.0 and 56.3 %), and in
github.com/calculon-ai/calculon (`validation/seqsel/tab5`, `calculon/llm/validation.py`).
"""

from __future__ import annotations

from typing import NamedTuple

from flux_megatron.lab.perf.step import predict
from flux_megatron.launch.workload import Cluster, Link, Model, Nics, Parallel, Training, Workload


class Published(NamedTuple):
    """Seconds of an iteration, TP 8 within nodes, DP 1, sequences of 2048: with selective
    recomputation and sequence parallelism, and with full recomputation alone.
    """

    name: str
    hidden: int
    heads: int
    layers: int
    pp: int
    virtual_stages: int
    batch: int
    micro_batch: int
    selective_s: float
    full_s: float


RUNS = (
    Published("22B", 6144, 64, 48, 1, 1, 4, 4, 1.10, 1.42),
    Published("175B", 12288, 96, 96, 8, 3, 64, 1, 13.75, 18.13),
    Published("530B", 20480, 128, 105, 35, 3, 280, 1, 37.83, 49.05),
    Published("1T", 25600, 160, 128, 64, 1, 512, 1, 71.49, 94.42),
)

# MFU of GPT-3 175B on 96 H100 with a batch of 1152 sequences: README of Megatron-LM core_v0.16.1,
# strong scaling. It states neither the split nor the length of sequences.
HOPPER_MFU = 0.47


def on_hopper(pp: int) -> Workload:
    """That run, assumed: TP 8, PP 4 or 12, sequences of 4096, exchanges of replicas overlapped."""
    link, nics = Link("nvlink", 450.0), Nics(8, 50.0)
    return Workload(
        model=Model("GPT-3 175B", 96, 12288, 96, 96, 49152, 131072, 4096),
        cluster=Cluster("eos", "H100-SXM5-80GB", 12, 8, 80.0, link, nics),
        parallel=Parallel(8, pp, 12 // pp, {4: 6, 12: 4}[pp]),
        training=Training(1, 1152, 10, 1, overlap_grad_reduce=True, overlap_param_gather=True),
        arm="megatron",
    )


def workload(run: Published, *, full: bool) -> Workload:
    """The run as a workload: fp16, unfused attention, one replica."""
    size = 4 * run.hidden
    link, nics = Link("nvlink", 300.0), Nics(8, 25.0)
    return Workload(
        model=Model(run.name, run.layers, run.hidden, run.heads, run.heads, size, 51200, 2048),
        cluster=Cluster("selene", "A100-SXM4-80GB", run.pp, 8, 80.0, link, nics),
        parallel=Parallel(8, run.pp, 1, run.virtual_stages, sequence_parallel=not full),
        training=Training(
            run.micro_batch, run.batch, 10, 1, "float16", "full" if full else "selective",
            flash_attention=False, distributed_optimizer=False,
        ),
        arm="megatron",
    )  # fmt: skip


def seconds(run: Published, *, full: bool) -> tuple[float, float]:
    """(published, predicted)."""
    step = predict(workload(run, full=full))
    return run.full_s if full else run.selective_s, step.step_us * 1e-6

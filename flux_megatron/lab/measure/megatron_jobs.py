"""The processes of `iterations`: Megatron-LM's unedited pretrain_gpt.py, and their ranks."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from flux_megatron.lab.results import logs
from flux_megatron.lab.results.iterations import Iteration, ResultsError
from flux_megatron.launch import megatron_arguments
from flux_megatron.launch.experiment import load
from flux_megatron.launch.workload import Arm, Workload

EXPERIMENTS = (
    "node/gpt3-175b-4-layers_h200", "node/llama2-70b-8-layers_h200",
    "node/qwen3-14b-6-layers_h200", "node/qwen3-30b-a3b-4-layers_h200",
    "node/gpt-oss-20b-4-layers_h200", "node/mixtral-8x7b-2-layers_h200",
)  # fmt: skip
BLOCK, PAIRS = 5, 9  # 36 timed iterations of each arm; with 5 pairs one odd pair hid 5 %
WARM_UP, TIMED = 10, 30  # of an arm that has a process of its own
ARMS = ("compare", "te")
COPIES = re.compile(r"^without_collectives: copies took ([\d.]+) ms$", re.MULTILINE)
TURN = ("stock", "flux", "without_collectives")  # of a comparison
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "tp": {},
    "dp": {
        "parallel.dp": 2, "training.distributed_optimizer": True,
        "training.overlap_grad_reduce": True, "training.overlap_param_gather": True,
    },
    "ep": {"parallel.dp": 2},
    "pp": {"parallel.pp": 2, "parallel.virtual_stages": 2},
}  # fmt: skip
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"  # Megatron asks for 1 where TP is more than 1
UNFUSED = ["--no-masked-softmax-fusion"]  # no arm has it; Megatron would compile it
DEEPEP = [
    "--moe-token-dispatcher-type", "flex", "--moe-enable-deepep", "--moe-permute-fusion",
]  # fmt: skip
BETWEEN_MICRO_BATCHES = ["--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute"]
EP = "--expert-model-parallel-size"
GRAPHS = ["--te-rng-tracker", "--cuda-graph-impl", "local"]
# Megatron asks for it where experts are spread; training does not read it
OF_EXPERTS = [*GRAPHS, "--moe-pad-experts-for-cuda-graph-inference"]
# The host waits for the splits of Megatron's dropless experts, so its graphs end before them
BEFORE_EXPERTS = [
    "--te-rng-tracker", "--cuda-graph-impl", "transformer_engine", "--cuda-graph-scope",
    "attn", "moe_router", "moe_preprocess",
]  # fmt: skip
# Arms that have a process of their own: the name in rows, the experiment's arm, and more words
ALONE: Mapping[str, tuple[str, Arm, list[str]]] = {
    "te": ("tp_comm_overlap", "te", []),
    "stock": ("stock", "megatron", []),
    "flux": ("flux", "flux", []),
    "experts": ("overlap_moe_expert_parallel_comm", "megatron", BETWEEN_MICRO_BATCHES),
    "deepep": ("deepep", "megatron", DEEPEP),
    "deepep_graphs": ("deepep_graphs", "megatron", [*DEEPEP, *BEFORE_EXPERTS]),
    "stock_graphs": ("stock_graphs", "megatron", GRAPHS),
    "flux_graphs": ("flux_graphs", "flux", GRAPHS),
}
WITH_EXPERTS: Mapping[str, tuple[Arm, list[str]]] = {
    "stock_graphs": ("megatron", BEFORE_EXPERTS), "flux_graphs": ("flux", OF_EXPERTS),
}  # fmt: skip
TWICE = ("stock_graphs", "flux_graphs") * 2
KNOWN = ("compare", "graphs", *ALONE)


@dataclass(frozen=True)
class Length:
    """Of a comparison: iterations of a block, and turns that count. Of another arm: iterations."""

    block: int = BLOCK
    pairs: int = PAIRS
    timed: int = TIMED


@dataclass(frozen=True)
class Job:
    """One process a rank."""

    name: str
    workload: Workload
    arguments: list[str]
    length: Length

    @property
    def words(self) -> list[str]:
        """Of pretrain_gpt.py; of an argument that is there twice the last counts."""
        return [*megatron_arguments.render(self.workload), *self.arguments]

    @property
    def M(self) -> int:
        return self.workload.model.seq_length * self.workload.training.micro_batch


def jobs(
    experiment: str, M: int, tp: int, more: Sequence[str], micro_batches: int,
    arms: Sequence[str], layout: str, length: Length, layers: int,
) -> Iterator[Job]:  # fmt: skip
    """The processes of the arms, in their order. Sequences are the model's, or M where that is
    shorter. `layers`: so many in place of the model's, for GPUs of less memory.
    """
    shipped = load(experiment)
    sequence = shipped.arms["flux"].model.seq_length
    micro_batch, left = divmod(M, sequence) if sequence <= M else (1, 0)
    assert not left, f"M {M} is no multiple of {sequence}"
    beside = LAYOUTS[layout]
    replicas = beside.get("parallel.dp", 1)
    overrides = {
        "parallel.tp": tp, "parallel.dp": replicas,
        "cluster.gpus_per_node": tp * replicas * beside.get("parallel.pp", 1),
        "training.micro_batch": micro_batch,
        "training.global_batch": micro_batch * micro_batches * replicas,
        "training.steps": WARM_UP + length.timed, "training.warmup_steps": WARM_UP,
        "model.seq_length": min(M, sequence), **beside,
    }  # fmt: skip
    found = load(experiment, overrides).arms
    experts = found["flux"].model.experts
    if layers:
        model = found["flux"].model
        name = re.sub(r"\d+-layers", f"{layers}-layers", model.name)
        model = replace(model, name=name, layers=layers)
        found = {arm: replace(workload, model=model) for arm, workload in found.items()}

    def job(name: str, arm: Arm, *own: str, steps: int = 0) -> Job:
        assert arm in found, f"{arm} given, one of the arms {[*found]} of {experiment} expected"
        workload, words = found[arm], [*shipped.extra_arguments[arm]]
        if any(word.startswith(EP) for word in words):  # over all GPUs
            words.append(f"{EP}={tp * replicas}")
        if steps:
            workload = replace(workload, training=replace(workload.training, steps=steps))
        return Job(name, workload, [*words, *more, *UNFUSED, *own], length)

    for one in chain.from_iterable(TWICE if arm == "graphs" else [arm] for arm in arms):
        if one == "compare":
            steps = len(TURN) * length.block * (length.pairs + 1)  # those of the first turn too
            yield job("compare", "flux", "--flux-compare", str(length.block), steps=steps)
            continue
        assert one in ALONE, f"arm {one} given, one of {KNOWN} expected"
        name, arm, own = ALONE[one]
        if experts and one in WITH_EXPERTS:
            arm, own = WITH_EXPERTS[one]
        yield job(name, arm, *own)


class Process:
    """All ranks of a job, each runs `script`; they import and wait until `begin`."""

    def __init__(self, job: Job, checkout: Path, folder: Path, script: str) -> None:
        self.job, self.logs, self.gate = job, folder / "logs", folder / "begin"
        rendered = megatron_arguments.render(job.workload, cache=folder.parent / "cache")
        ranks = job.workload.parallel.world_size
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        # ranks that share a file cut each other's lines
        command += ["--redirects", "3", "--log-dir", str(self.logs)]
        command += [script, "rank", str(self.gate), "pretrain_gpt.py", *rendered]
        environment = {CONNECTIONS: "1", **os.environ}
        folder.mkdir()
        self.process = subprocess.Popen(
            [sys.executable, *command, *job.arguments],
            cwd=checkout, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def begin(self) -> None:
        self.gate.touch()

    def iterations(self, limit_s: float) -> tuple[Iteration, ...]:
        """Every iteration, when all have ended. `ResultsError` if a rank failed."""
        try:
            code: int | str = self.process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            self.stop()
            code = f"stopped after {limit_s:g} s"
        if code != 0:
            said = [_end_of(file) for file in sorted(self.logs.rglob("stderr.log"))]
            raise ResultsError("\n".join([f"{self.job.name}, M {self.job.M}: {code}", *said]))
        return logs.of_megatron(self.logs, self.job.workload.training.global_batch).iterations

    def copies_ms(self) -> float:
        """Of an iteration without collectives, the copies in their places."""
        said = (file.read_text(errors="replace") for file in self.logs.rglob("stdout.log"))
        found = [float(ms) for log in said for ms in COPIES.findall(log)]
        return round(statistics.median(found), 3) if found else 0.0

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)


def _end_of(log: Path) -> str:
    """What a rank said last: of a dump of its threads, where its first thread was."""
    said, _, _ = log.read_text().partition("\nExtension modules:")
    before, dumped, first_thread = said.rpartition("(most recent call first):")
    return f"{before[-500:]}{dumped}{first_thread[:2500]}" if dumped else said[-3000:]


def rank(gate: Path, script: str, arguments: list[str]) -> None:
    """One rank: everything that touches no GPU, then the script. If it is stopped it says where it
    was.
    """
    from flux_megatron.integration import bootstrap
    from flux_megatron.lab.measure import gpu_run, skewed_router, without_collectives

    gpu_run.share_gpus()
    if links := os.environ.get(gpu_run.APART):
        gpu_run.be_apart(links)
    without_collectives.add()
    faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)
    bootstrap.enter(script, arguments)
    import megatron.training  # noqa: F401  most of the time of a start

    from flux_megatron.integration.apex_shim import provide_wgrad_kernels

    provide_wgrad_kernels()
    if share := os.environ.get(skewed_router.SKEW):
        from megatron.core.transformer.moe.router import TopKRouter

        skewed_router.use(float(share), TopKRouter)
    while not gate.exists():
        time.sleep(0.02)
    bootstrap.run()

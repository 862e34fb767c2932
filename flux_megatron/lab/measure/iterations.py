"""Whole training iterations of Megatron-LM's unedited pretrain_gpt.py: stock, ours, userbuffers.

    python -m flux_megatron.lab.measure.iterations path/to/Megatron-LM iterations.jsonl --tp 4
    python -m flux_megatron.lab.measure.iterations path/to/Megatron-LM iterations.jsonl --tp 2 \
        --layout dp
    python -m flux_megatron.lab.measure.iterations path/to/Megatron-LM iterations.jsonl --tp 2 \
        --layout dp \
        --arms flux --timed 990                                           # does it hang?

The models of `configs/experiments/node` at several M, `--micro-batches` of them a step, by default
one: the optimizer's share is largest then. `--layers` makes them fit less memory. `--layout` says
what tensor parallelism is beside: nothing, two replicas whose gradients and parameters travel
meanwhile, or two stages of an interleaved pipeline. For each model and M two processes a rank run
(`--arms`), one after the other on the same GPUs:
- compare, `--flux-compare`: stock iterations and ours in turn, blocks of `--block`. The first pair
  of blocks and the first iteration of every block warm up; times of the others are compared pair by
  pair, `--pairs` of them.
- te, `--tp-comm-overlap`: TransformerEngine's layers and userbuffers, `--timed` iterations after
  `WARM_UP`.
- flux: ours alone, as many.
- graphs: layers are captured in CUDA graphs, where the host takes no time. One process cannot
  switch between arms then: stock Megatron's (of TransformerEngine's layers) and ours take turns,
  twice.

All run with TransformerEngine's attention and optimizer where it is installed, and with our kernel
for fused weight gradients where apex is not. A process imports Megatron while the one before it
measures, and touches no GPU until that has ended: it saves ten seconds a process.

Prints a line a row, and appends the rows to the file. Measure plans before: `flux-megatron tune`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from flux_megatron.lab.results import logs
from flux_megatron.lab.results.iterations import ResultsError
from flux_megatron.launch import megatron_arguments
from flux_megatron.launch.experiment import load
from flux_megatron.launch.workload import Arm, Workload

EXPERIMENTS = (
    "node/gpt3-175b-4-layers_h200", "node/llama2-70b-8-layers_h200",
    "node/qwen3-14b-6-layers_h200",
)  # fmt: skip
BLOCK, PAIRS = 5, 9  # 36 timed iterations of each arm; with 5 pairs one odd pair hid 5 %
WARM_UP, TIMED = 10, 30  # of an arm that has a process of its own
ARMS = ("compare", "te")
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "tp": {},
    "dp": {
        "parallel.dp": 2, "training.distributed_optimizer": True,
        "training.overlap_grad_reduce": True, "training.overlap_param_gather": True,
    },
    "pp": {"parallel.pp": 2, "parallel.virtual_stages": 2},
}  # fmt: skip
UNFUSED = ["--no-masked-softmax-fusion"]  # no arm has it; Megatron would compile it
GRAPHS = ["--cuda-graph-impl", "local", "--te-rng-tracker"]
RANK = __file__


@dataclass(frozen=True)
class Length:
    """Of a comparison: iterations of a block, and pairs of blocks. Of another arm: iterations."""

    block: int = BLOCK
    pairs: int = PAIRS
    timed: int = TIMED

    @property
    def compared(self) -> int:
        """All iterations of a comparison, those of its first pair too."""
        return 2 * self.block * (self.pairs + 1)


@dataclass(frozen=True)
class Job:
    """One process a rank."""

    name: str
    workload: Workload
    arguments: list[str]
    length: Length = Length()

    @property
    def words(self) -> list[str]:
        """Of pretrain_gpt.py; of an argument that is there twice the last counts."""
        return [*megatron_arguments.render(self.workload), *self.arguments]

    @property
    def M(self) -> int:
        return self.workload.model.seq_length * self.workload.training.micro_batch


def jobs(
    experiment: str, M: int, tp: int, more: Sequence[str], micro_batches: int = 1,
    arms: Sequence[str] = ARMS, layout: str = "tp", length: Length = Length(), layers: int = 0,
) -> Iterator[Job]:  # fmt: skip
    """The processes of the arms, in their order. `layers`: so many in place of the model's."""
    found = _workloads(experiment, M, tp, micro_batches, layout, length)
    if layers:
        found = {arm: with_layers(workload, layers) for arm, workload in found.items()}
    arguments = [*more, *UNFUSED]
    compared = replace(found["flux"].training, steps=length.compared)
    flux = replace(found["flux"], training=compared)
    words = [*arguments, "--flux-compare", str(length.block)]
    in_graphs = [*arguments, *GRAPHS]
    known = {
        "compare": [Job("compare", flux, words, length)],
        "te": [Job("tp_comm_overlap", found["te"], arguments, length)],
        "flux": [Job("flux", found["flux"], arguments, length)],
        "graphs": 2 * [
            Job("stock_graphs", found["megatron"], in_graphs, length),
            Job("flux_graphs", found["flux"], in_graphs, length),
        ],
    }  # fmt: skip
    for arm in arms:
        yield from known[arm]


def _workloads(
    experiment: str, M: int, tp: int, micro_batches: int, layout: str, length: Length
) -> Mapping[Arm, Workload]:
    """By arm. Sequences are the model's, or M where that is shorter."""
    sequence = load(experiment).arms["flux"].model.seq_length
    micro_batch, left = divmod(M, sequence) if sequence <= M else (1, 0)
    assert not left, f"M {M} is no multiple of {sequence}"
    beside = LAYOUTS[layout]
    replicas = beside.get("parallel.dp", 1)
    overrides = {
        "parallel.tp": tp, "cluster.gpus_per_node": tp * replicas * beside.get("parallel.pp", 1),
        "training.micro_batch": micro_batch,
        "training.global_batch": micro_batch * micro_batches * replicas,
        "training.steps": WARM_UP + length.timed, "training.warmup_steps": WARM_UP,
        "model.seq_length": min(M, sequence), **beside,
    }  # fmt: skip
    return load(experiment, overrides).arms


def with_layers(workload: Workload, layers: int) -> Workload:
    """The same with so many layers, for GPUs of less memory: in its model's name, too."""
    name = re.sub(r"\d+-layers", f"{layers}-layers", workload.model.name)
    return replace(workload, model=replace(workload.model, name=name, layers=layers))


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
        environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        folder.mkdir()
        self.process = subprocess.Popen(
            [sys.executable, *command, *job.arguments],
            cwd=checkout, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def begin(self) -> None:
        self.gate.touch()

    def times_ms(self, limit_s: float = 150) -> dict[int, float]:
        """Of every iteration, by its number, when all have ended. `ResultsError` if one failed."""
        try:
            code: int | str = self.process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            self.stop()
            code = f"stopped after {limit_s:g} s"
        if code != 0:
            said = [_end_of(file) for file in sorted(self.logs.rglob("stderr.log"))]
            raise ResultsError("\n".join([f"{self.job.name}, M {self.job.M}: {code}", *said]))
        series = logs.of_megatron(self.logs, self.job.workload.training.global_batch)
        return {i.number: round(1e3 * i.seconds, 2) for i in series.iterations}

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)


def _end_of(log: Path) -> str:
    """What a rank said last: of a dump of its threads, where its first thread was."""
    said, _, _ = log.read_text().partition("\nExtension modules:")
    before, dumped, first_thread = said.rpartition("(most recent call first):")
    return f"{before[-500:]}{dumped}{first_thread[:2500]}" if dumped else said[-3000:]


def rank(
    gate: Path, script: str, arguments: list[str], prepare: Callable[[], None] = lambda: None
) -> None:
    """One rank: everything that touches no GPU, and `prepare`, then the script. If it is stopped
    it says where it was.
    """
    from flux_megatron.integration import bootstrap

    faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)
    bootstrap.enter(script, arguments)
    import megatron.training  # noqa: F401  most of the time of a start

    from flux_megatron.integration.apex_shim import provide_wgrad_kernels

    provide_wgrad_kernels()
    prepare()
    while not gate.exists():
        time.sleep(0.02)
    bootstrap.run()


def recording_rank(
    gate: Path, script: str, arguments: list[str], record: Callable[[Callable, Path], Callable]
) -> None:
    """As `rank`; the first one's iterations are those of `record`, which appends rows to a file."""

    def prepare() -> None:
        import megatron.training.training as training

        if os.environ["RANK"] == "0":
            training.train_step = record(training.train_step, gate.with_name("recorded.jsonl"))

    rank(gate, script, arguments, prepare)


def recorded(
    job: Job, checkout: Path, where: Path, script: str, limit_s: float = 150
) -> list[dict[str, Any]]:
    """What the first rank of `script` has recorded of four blocks: stock, ours, stock, ours."""
    steps = replace(job.workload.training, steps=4 * BLOCK)
    job = replace(job, workload=replace(job.workload, training=steps))
    process = Process(job, checkout, where, script)
    process.begin()
    process.times_ms(limit_s)
    return [json.loads(line) for line in (where / "recorded.jsonl").read_text().splitlines()]


def compared(
    times: dict[int, float], length: Length
) -> tuple[dict[str, list[float]], str, list[float]]:
    """Times of each arm, and their ratio: `Speedup` in words, and low, middle, high in numbers."""
    from flux_megatron.integration.comparison import WARM_UP as COLD
    from flux_megatron.integration.comparison import speedup

    blocks = [
        [times[1 + length.block * index + at] for at in range(COLD, length.block)]
        for index in range(2, 2 * (length.pairs + 1))
    ]
    stock, flux = blocks[::2], blocks[1::2]
    found = speedup(list(zip(stock, flux, strict=True)))
    low, high = found.interval or (found.ratio, found.ratio)
    ratio = [round(value, 4) for value in (low, found.ratio, high)]
    arms = {"stock": [*chain(*stock)], "flux": [*chain(*flux)]}
    return arms, str(found), ratio


def rows(job: Job, times: dict[int, float], machine: dict) -> Iterator[dict]:
    arms = {job.name: [ms for number, ms in times.items() if number > WARM_UP]}
    ratios: dict[str, object] = {}
    if job.name == "compare":
        arms, words, ratio = compared(times, job.length)
        ratios = {"speedup_low_middle_high": ratio, "speedup": words}
    for arm, milliseconds in arms.items():
        yield {
            "what": "iteration", "arm": arm, "model": job.workload.model.name,
            "layers": job.workload.model.layers, "M": job.M, **asdict(job.workload.parallel),
            "micro_batches": job.workload.micro_batches,
            "transformer_impl": _last(job.words, "--transformer-impl"),
            "seq_length": job.workload.model.seq_length, "dtype": job.workload.training.dtype,
            "median_ms": round(statistics.median(milliseconds), 2), "times_ms": milliseconds,
            **(ratios if arm == "flux" else {}), **machine,
        }  # fmt: skip


def _last(words: list[str], option: str) -> str:
    return words[len(words) - words[::-1].index(option)]


def machine_of(checkout: Path, commit: str) -> dict:
    import torch

    from flux_megatron.tuning import environment

    try:
        from transformer_engine import __version__ as te
    except ImportError:
        te = None
    known = asdict(environment.of(torch.device("cuda", 0)))
    known["max_connections"] = "1"
    return {
        **known, "nccl": ".".join(map(str, torch.cuda.nccl.version())), "transformer_engine": te,
        "megatron_lm": checkout.name, "nvls": os.environ.get("NCCL_NVLS_ENABLE", "default"),
        "commit": commit, "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def main(
    checkout: Path, out: Path, tp: int = 4, commit: str = "unknown",
    M: Annotated[str, typer.Option("--M")] = "8192,4096,2048", more: str = "",
    seconds: float = 3600, arms: str = ",".join(ARMS), layout: str = "tp",
    micro_batches: int = 1, models: str = "", block: int = BLOCK, pairs: int = PAIRS,
    timed: int = TIMED, limit_s: float = 150, layers: int = 0,
) -> None:  # fmt: skip
    """Measure the models with `models` in their names at every M, as long as `seconds` allow to
    begin another process; one that takes longer than `limit_s` is stopped. Exits 1 if one failed
    or there was none.
    """
    machine, end = machine_of(checkout, commit), time.monotonic() + seconds
    length = Length(block, pairs, timed)
    wanted = [
        job for rows in map(int, M.split(",")) for experiment in EXPERIMENTS if models in experiment
        for job in jobs(experiment, rows, tp, more.split(), micro_batches, arms.split(","),
                        layout, length, layers)
    ]  # fmt: skip
    good = bool(wanted)
    with tempfile.TemporaryDirectory() as folder:
        processes = _one_ahead(wanted, checkout, Path(folder))
        for process in processes:
            try:
                found = list(rows(process.job, process.times_ms(limit_s), machine))
            except ResultsError as error:
                print(error, file=sys.stderr, flush=True)
                good = False
                continue
            with out.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in found)
            print("\n".join(map(_line, found)), flush=True)
            if time.monotonic() > end:
                print("no time for the others")
                processes.close()
    if not good:
        raise typer.Exit(1)


def _one_ahead(wanted: Sequence[Job], checkout: Path, folder: Path) -> Generator[Process]:
    """Each when it is its turn; the one after it has been started by then."""
    started: list[Process] = []
    try:
        for turn in range(len(wanted)):
            for index in range(len(started), min(turn + 2, len(wanted))):
                started += [Process(wanted[index], checkout, folder / str(index), RANK)]
            started[turn].begin()
            yield started[turn]
    finally:
        for process in started:
            process.stop()


def _line(row: dict) -> str:
    said = row.get("speedup", "")
    where = " ".join(f"{name} {row[name]}" for name in ("tp", "dp", "pp"))
    what = f"{row['model']:20} {where} M {row['M']:5} x {row['micro_batches']} {row['arm']:15}"
    return f"{what} {row['median_ms']:8.2f} ms {said}"


def as_rank_or_command(
    rank: Callable[[Path, str, list[str]], None], main: Callable[..., None]
) -> None:
    """What a script does that `Process` starts as its ranks."""
    if sys.argv[1:2] == ["rank"]:
        rank(Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
    else:
        typer.run(main)


if __name__ == "__main__":
    as_rank_or_command(rank, main)

"""What `flux-megatron tune` is asked for: the problems of a model, and the ranks that measure them.

No torch: what cannot be measured is refused before any rank starts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flux_megatron import machine, option_values, settings
from flux_megatron.errors import BadInput
from flux_megatron.lab.bench import launch, suites, tune_model
from flux_megatron.lab.bench.tune_model import Widths
from flux_megatron.lab.train import config as configs
from flux_megatron.lab.train.config import TrainConfig
from flux_megatron.patterns import COLUMN, ROW, Pattern
from flux_megatron.problem import Problem

DTYPES = ("bfloat16", "float16", "float32")
TRIAL = "`flux-megatron tune --suite gpt3-175b --device cpu`"
RANK_TIMEOUT_S = 30  # a plan that hangs has failed


@dataclass(frozen=True)
class Request:
    """The options of the command; None for what was not given."""

    config: Path | None
    suite: str | None
    tp: int | None
    M: str | None
    dtype: str | None
    scale: int | None
    sequence_parallel: bool
    beside: bool
    device: str | None
    widths: Widths | None = None
    arguments: Sequence[str] = ()  # Megatron's
    vocab: int | None = None  # beside Megatron's

    def problems(self) -> tuple[list[Problem], str]:
        """What is to be measured, and its name. `BadInput` where this machine cannot."""
        sources = (self.config, self.suite, self.widths, self.arguments or None)
        if len([source for source in sources if source is not None]) != 1:
            raise BadInput(
                "one of --config, --suite, --hidden and Megatron's arguments behind -- is needed"
            )
        if self.config is not None:
            found, name = self._of_config(), self.config.stem
        elif self.suite is not None:
            found, name = self._of_suite(), self.suite
        else:
            found, name = self._of_model()
        if self.config is None and not self.sequence_parallel:
            name += "_all-reduced"  # beside the file of the same model
        if found[0].device == "cpu":
            sizes = ((one.M, one.N_local, one.K_local) for one in found)
            machine.check_interpreted(sizes, f"{TRIAL} takes a small model")
        return and_beside(found) if self.beside else found, name

    def _of_config(self) -> list[Problem]:
        assert self.config is not None, "asked for"
        of_suite = {"--tp": self.tp, "--M": self.M, "--dtype": self.dtype, "--scale": self.scale}
        if given := [name for name, value in of_suite.items() if value is not None]:
            raise BadInput(f"{', '.join(given)} given with --config, which has its own: --suite?")
        try:
            run = configs.load(self.config, {})
        except configs.ConfigError as error:
            raise BadInput(str(error)) from None
        on_cpu = run.parallel.device == "cpu"
        device = self.device or ("cpu" if on_cpu else "cuda")
        machine.ranks(device, run.parallel.tp, "--device cpu", option="parallel.tp")
        return problems_of_config(run, device)

    def _of_suite(self) -> list[Problem]:
        device, Ms, dtype = self._given()
        option_values.names("--suite", str(self.suite), suites.SUITES)
        scale = self.scale or (suites.CPU_SCALE if device == "cpu" else 1)
        tp = machine.ranks(device, self.tp, TRIAL)
        return problems_of_suite(
            str(self.suite), Ms, tp, dtype, device, scale, self.sequence_parallel
        )

    def _of_model(self) -> tuple[list[Problem], str]:
        if self.scale is not None:
            raise BadInput(f"--scale {self.scale} given without --suite, which alone it divides")
        widths, tp = self.widths, self.tp
        if widths is None:
            widths, of_run = tune_model.of_megatron(self.arguments, self.vocab)
            if None not in (tp, of_run) and tp != of_run:
                raise BadInput(f"--tp {tp} and --tensor-model-parallel-size {of_run} given")
            tp = tp or of_run
        device, Ms, dtype = self._given()
        tp = machine.ranks(device, tp, TRIAL, least=2)
        if uneven := [M for M in Ms if M % tp and self.sequence_parallel]:
            raise BadInput(f"--M {uneven} given, multiples of the {tp} ranks expected")
        layers = widths.layers(tp)
        found = problems_of_model(
            layers, widths.vocab, Ms, tp, dtype, device, self.sequence_parallel
        )
        return found, f"{widths}"

    def _given(self) -> tuple[str, tuple[int, ...], str]:
        """The device, every M and the dtype of what is no training run."""
        device = self.device or "cuda"
        machine.check_device(device)
        small = device == "cpu"
        Ms = option_values.numbers("--M", self.M or ("64" if small else "8192,4096,2048"))
        dtype = self.dtype or ("float32" if small else "bfloat16")
        option_values.names("--dtype", dtype, DTYPES)
        return device, Ms, dtype


def problems_of_suite(
    suite: str, Ms: Sequence[int], tp: int, dtype: str, device: str, scale: int = 1,
    sequence_parallel: bool = True,
) -> list[Problem]:  # fmt: skip
    """The problems of a model of `bench.suites`, forward and backward."""
    problems = [
        Problem(Pattern(pattern), case.M, case.N, case.K, dtype, tp, case.layout, device)
        for pattern in (COLUMN, ROW)
        for case in suites.cases(suite, str(pattern), tuple(Ms), tp, scale)
    ]
    return problems if sequence_parallel else all_reduced(problems)


def all_reduced(problems: Sequence[Problem]) -> list[Problem]:
    """The same layers' problems without sequence parallelism: a row layer's forward and a column
    layer's dgrad.
    """
    return [replace(one, pattern=Pattern.GEMM_AR) for one in problems if one.spec.scatters]


def problems_of_config(config: TrainConfig, device: str) -> list[Problem]:
    """The problems of a training run: each linear layer's forward and its dual, and the LM head's.

    `BadInput` if the run has none.
    """
    model, tp = config.model, config.parallel.tp
    if tp == 1:
        raise BadInput("parallel.tp=1 given: only layers over several ranks have plans")
    fc1 = 2 * model.ffn if model.swiglu else model.ffn
    layers = suites.Model(model.hidden, 3 * model.hidden, model.hidden, fc1, model.ffn)
    return problems_of_model(
        layers, config.padded_vocab, [model.seq_length * config.train.micro_batch], tp,
        config.train.dtype, device, config.parallel.sequence_parallel,
    )  # fmt: skip


def problems_of_model(
    model: suites.Model, vocab: int | None, Ms: Sequence[int], tp: int, dtype: str, device: str,
    sequence_parallel: bool = True,
) -> list[Problem]:  # fmt: skip
    """Each kind of linear layer's forward and its dual, once at every M; of the output layer too if
    there is a `vocab`.
    """
    column = dict.fromkeys([model.qkv, model.fc1, *([vocab] if vocab else [])])
    row = dict.fromkeys([model.attention, model.ffn])
    shapes = [(COLUMN, N, model.hidden) for N in column]
    shapes += [(ROW, model.hidden, K) for K in row]
    forward = [
        Problem(pattern, M, N, K, dtype, tp, device=device)
        for M in sorted(set(Ms), reverse=True)
        for pattern, N, K in shapes
    ]
    problems = forward + [problem.dual for problem in forward]
    return problems if sequence_parallel else all_reduced(problems)


def and_beside(problems: Sequence[Problem]) -> list[Problem]:
    """Each problem alone, and beside others."""
    return [replace(problem, beside=beside) for problem in problems for beside in (False, True)]


def start(ranks: int, device: str, connections: int, arguments: Sequence[str]) -> int:
    """Run `flux-megatron ARGUMENTS` on so many ranks; the exit code.

    They get CUDA_DEVICE_MAX_CONNECTIONS=`connections`, or none for 0.
    """
    inherited = launch.inherited()
    cache = settings.read(os.environ).cache
    option_values.folder("FLUX_MEGATRON_CACHE", cache)
    environment = {
        **launch.defaults(ranks, RANK_TIMEOUT_S),
        **inherited,
        "CUDA_DEVICE_MAX_CONNECTIONS": str(connections),
        **launch.needed(device),
    }
    if not connections:
        del environment["CUDA_DEVICE_MAX_CONNECTIONS"]
    interrupted = f"what is measured is kept in {cache}; the same command goes on from there"
    command = ["-m", "flux_megatron.cli", *arguments]
    return launch.run(command, ranks, environment, interrupted)

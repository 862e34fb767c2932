"""What `flux-megatron tune` is asked for: the problems of a model, and the ranks that measure them.

No torch: what cannot be measured is refused before any rank starts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from flux_megatron import machine, option_values, settings
from flux_megatron.errors import BadInput
from flux_megatron.patterns import COLUMN, ROW, Pattern
from flux_megatron.problem import Problem
from flux_megatron.tune_command import ranks, widths
from flux_megatron.tune_command.widths import CPU_SCALE, MODELS, Model, Widths

DTYPES = ("bfloat16", "float16", "float32")
TRIAL = "`flux-megatron tune --suite gpt3-175b --device cpu`"
RANK_TIMEOUT_S = 30  # a plan that hangs has failed


@dataclass(frozen=True)
class Request:
    """The options of the command; None for what was not given."""

    suite: str | None
    tp: int | None
    M: str | None
    dtype: str | None
    scale: int | None
    sequence_parallel: bool
    beside: bool
    device: str
    widths: Widths | None = None
    arguments: Sequence[str] = ()  # Megatron's
    vocab: int | None = None  # beside Megatron's

    def problems(self) -> tuple[list[Problem], str]:
        """What is to be measured, and its name. `BadInput` where this machine cannot."""
        sources = (self.suite, self.widths, self.arguments or None)
        if len([source for source in sources if source is not None]) != 1:
            raise BadInput("one of --suite, --hidden and Megatron's arguments behind -- is needed")
        machine.check_device(self.device)
        small = self.device == "cpu"
        Ms = option_values.numbers("--M", self.M or ("64" if small else "8192,4096,2048"))
        dtype = self.dtype or ("float32" if small else "bfloat16")
        option_values.name("--dtype", dtype, DTYPES)
        model, vocab, tp, name = self._of_suite() if self.suite is not None else self._of_model()
        if uneven := [M for M in Ms if M % tp and self.sequence_parallel]:
            raise BadInput(f"--M {uneven} given, multiples of the {tp} ranks expected")
        found = problems_of_model(model, vocab, Ms, tp, dtype, self.device, self.sequence_parallel)
        if not self.sequence_parallel:
            name += "_all-reduced"  # beside the file of the same model
        if small:
            sizes = ((one.M, one.N_local, one.K_local) for one in found)
            machine.check_interpreted(sizes, f"{TRIAL} takes a small model")
        return and_beside(found) if self.beside else found, name

    def _of_suite(self) -> tuple[Model, None, int, str]:
        name = str(self.suite)
        option_values.name("--suite", name, MODELS)
        model = MODELS[name].scaled(self.scale or (CPU_SCALE if self.device == "cpu" else 1))
        tp = machine.ranks(self.device, self.tp, TRIAL, least=2)
        if uneven := [width for width in astuple(model) if width % tp]:
            raise BadInput(f"{name}: widths {uneven} given, multiples of the {tp} ranks expected")
        return model, None, tp, name

    def _of_model(self) -> tuple[Model, int | None, int, str]:
        if self.scale is not None:
            raise BadInput(f"--scale {self.scale} given without --suite, which alone it divides")
        model, tp = self.widths, self.tp
        if model is None:
            model, of_run = widths.of_megatron(self.arguments, self.vocab)
            if None not in (tp, of_run) and tp != of_run:
                raise BadInput(f"--tp {tp} and --tensor-model-parallel-size {of_run} given")
            tp = tp or of_run
        tp = machine.ranks(self.device, tp, TRIAL, least=2)
        return model.layers(tp), model.vocab, tp, f"{model}"


def problems_of_model(
    model: Model, vocab: int | None, Ms: Sequence[int], tp: int, dtype: str, device: str,
    sequence_parallel: bool = True,
) -> list[Problem]:  # fmt: skip
    """Each kind of linear layer's forward and its dual, once at every M; of the output layer too if
    there is a `vocab`. Without sequence parallelism GEMM+AR: a row layer's forward and a column
    layer's dgrad.
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
    if sequence_parallel:
        return problems
    return [replace(one, pattern=Pattern.GEMM_AR) for one in problems if one.spec.scatters]


def and_beside(problems: Sequence[Problem]) -> list[Problem]:
    """Each problem alone, and beside others."""
    return [replace(problem, beside=beside) for problem in problems for beside in (False, True)]


def start(world_size: int, device: str, connections: int, arguments: Sequence[str]) -> int:
    """Run `flux-megatron ARGUMENTS` on so many ranks; the exit code.

    They get CUDA_DEVICE_MAX_CONNECTIONS=`connections`, or none for 0.
    """
    inherited = ranks.inherited()
    cache = settings.read(os.environ).cache
    option_values.folder("FLUX_MEGATRON_CACHE", cache)
    environment = {
        **ranks.defaults(world_size, RANK_TIMEOUT_S),
        **inherited,
        "CUDA_DEVICE_MAX_CONNECTIONS": str(connections),
        **ranks.needed(device),
    }
    if not connections:
        del environment["CUDA_DEVICE_MAX_CONNECTIONS"]
    interrupted = f"what is measured is kept in {cache}; the same command goes on from there"
    command = ["-m", "flux_megatron.cli", *arguments]
    return ranks.run(command, world_size, environment, interrupted)

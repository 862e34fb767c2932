"""What the ranks of a measurement are told. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flux_megatron import machine, option_values, settings
from flux_megatron.errors import BadInput
from flux_megatron.lab.bench import suites
from flux_megatron.lab.bench.suites import Case
from flux_megatron.tune_command.widths import CPU_SCALE, MODELS

# in every race
BASELINES = ("gemm", "ours_gemm", "serial", "serial_again", "megatron")
_OTHERS = (n for of in suites.PEERS.values() for names in of.values() for n in names)
KNOWN = (*settings.STRATEGIES, *dict.fromkeys(_OTHERS), *BASELINES)  # every candidate's name
# what is measured where nothing else is asked for
DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {
        "suite": "gpt3-175b,llama2-70b", "pattern": "ag_gemm,gemm_rs,backward",
        "M": "64,128,256,512,1024,2048,4096,8192", "rounds": 12, "scale": 1,
    },
    "cpu": {
        "suite": "gpt3-175b", "pattern": "ag_gemm,gemm_rs", "M": "64", "rounds": 2,
        "scale": CPU_SCALE,
    },
}  # fmt: skip
TRIAL = "`flux-megatron bench --device cpu`"
LOADS = ("all_reduce", "all_gather", "reduce_scatter")  # of `tuning.beside`
OPERATIONS = ("embedding_all_to_all", "expert_all_to_all", "expert_layers")


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """Of every measurement. After `time_limit_s` no further case is started; `scale` divides the
    model's widths.
    """

    out: str
    tp: int = 2
    device: str = "cuda"
    nvls: bool = False
    commit: str = ""
    time_limit_s: float | None = None
    scale: int = 1
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Options(RankOptions):
    """What to measure and how. `candidates` () means all.

    `beside` measures every case again under contention with each of the `loads`.
    `graphs` lets every candidate that communicates run once more, replayed from a CUDA graph.
    `shapes` replace suites, patterns and Ms; `all_plans` adds those that `tune` measures.
    """

    suites: tuple[str, ...]
    patterns: tuple[str, ...]
    Ms: tuple[int, ...]
    candidates: tuple[str, ...] = ()
    rounds: int = 12
    beside: bool = False
    loads: tuple[str, ...] = ("all_reduce",)
    graphs: bool = False
    shapes: tuple[str, ...] = ()
    all_plans: bool = False

    def cases(self) -> list[Case]:
        """All cases, by suite and M: some competitors are prepared for both together."""
        if self.shapes:
            return [suites.of_shape(text, self.tp) for text in self.shapes]
        return [
            case
            for suite in self.suites
            for M in sorted(set(self.Ms), reverse=True)
            for pattern in self.patterns
            for case in suites.cases(suite, pattern, (M,), self.tp, self.scale)
        ]


def parsed(
    *, suite: str | None, pattern: str | None, M: str | None, rounds: int | None,
    scale: int | None, tp: int | None, device: str, candidates: str, shapes: str, loads: str,
    **others: Any,
) -> Options:  # fmt: skip
    """The options of the command line, None for what was not given there. `BadInput` for what
    this machine cannot measure.
    """
    machine.check_device(device)
    given = {"suite": suite, "pattern": pattern, "M": M, "rounds": rounds, "scale": scale}
    chosen = DEFAULTS[device] | {name: value for name, value in given.items() if value is not None}
    options = Options(
        option_values.names("--suite", chosen["suite"], MODELS),
        option_values.names("--pattern", chosen["pattern"], suites.PATTERNS),
        option_values.numbers("--M", chosen["M"]),
        candidates=option_values.names("--candidates", candidates, KNOWN) if candidates else (),
        rounds=chosen["rounds"], scale=chosen["scale"], device=device,
        dtype="bfloat16" if device == "cuda" else "float32",
        tp=machine.ranks(device, tp, TRIAL), shapes=tuple(shapes.split(",")) if shapes else (),
        loads=option_values.names("--nccl-load", loads, LOADS),
        **others,
    )  # fmt: skip
    cases = options.cases()
    if device == "cpu":
        local = ((case.M, case.N_local, case.K_local) for case in cases)
        machine.check_interpreted(local, f"--scale {CPU_SCALE} and a smaller --M fit")
    return options


@dataclass(frozen=True)
class OperationOptions(RankOptions):
    names: tuple[str, ...]
    rounds: int = 12

    def __post_init__(self) -> None:
        if unknown := [name for name in self.names if name not in OPERATIONS]:
            raise BadInput(f"operations {unknown} given, some of {OPERATIONS} expected")

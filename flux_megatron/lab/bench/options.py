"""The options of a bench run. No torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from flux_megatron import machine, option_values, settings
from flux_megatron.errors import BadInput
from flux_megatron.lab.bench import suites
from flux_megatron.lab.bench.suites import Case
from flux_megatron.tune_command.widths import CPU_SCALE

# in every race: E is the same whoever else takes part
BASELINES = ("gemm", "gemm_again", "ours_gemm", "serial", "serial_again", "megatron")
COMPETITORS = (
    *dict.fromkeys(n for names in suites.PEERS.values() for n in names),
    *suites.GEMM_PEERS,
)
KNOWN = (*settings.STRATEGIES, *COMPETITORS, *BASELINES)  # every candidate's name
# what is measured where nothing else is asked for
DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {
        "suite": "gpt3-175b,llama2-70b",
        "pattern": "ag_gemm,gemm_rs,backward,gemm",
        "M": "64,128,256,512,1024,2048,4096,8192",
        "rounds": 12,
        "scale": 1,
    },
    "cpu": {
        "suite": "gpt3-175b",
        "pattern": "ag_gemm,gemm_rs",
        "M": "64",
        "rounds": 2,
        "scale": CPU_SCALE,
    },
}
TRIAL = "`flux-megatron bench --device cpu`"


def parsed(
    *, suite: str | None, pattern: str | None, M: str | None, rounds: int | None,
    scale: int | None, tp: int | None, device: str, candidates: str, **others: Any,
) -> Options:  # fmt: skip
    """The options of the command line, None for what was not given there. `BadInput` for what
    this machine cannot measure.
    """
    machine.check_device(device)
    given = {"suite": suite, "pattern": pattern, "M": M, "rounds": rounds, "scale": scale}
    chosen = DEFAULTS[device] | {name: value for name, value in given.items() if value is not None}
    asked: dict[str, Any] = {
        "suites": option_values.names("--suite", chosen["suite"], suites.SUITES),
        "patterns": option_values.names("--pattern", chosen["pattern"], suites.PATTERNS),
        "Ms": option_values.numbers("--M", chosen["M"]),
        "candidates": option_values.names("--candidates", candidates, KNOWN) if candidates else (),
    }
    options = Options(
        **asked, rounds=chosen["rounds"], scale=chosen["scale"], device=device,
        tp=machine.ranks(device, tp, TRIAL), **others,
    )  # fmt: skip
    options.check()
    return options


@dataclass(frozen=True)
class Options:
    """What to measure and how. `candidates` () means all; `scale` divides the model's widths.

    `beside` measures every case twice: alone, and beside all-reduces of another communicator.
    `graphs` lets every candidate that communicates run once more, replayed from a CUDA graph.
    """

    suites: tuple[str, ...]
    patterns: tuple[str, ...]
    Ms: tuple[int, ...]
    out: str
    candidates: tuple[str, ...] = ()
    rounds: int = 12
    tp: int = 4
    device: str = "cuda"
    scale: int = 1
    time_limit_s: float | None = None
    nvls: bool = False
    commit: str = ""
    beside: bool = False
    graphs: bool = False

    @property
    def conditions(self) -> tuple[bool, ...]:
        """The values of `Row.beside` in the rows of a case."""
        return (False, True) if self.beside else (False,)

    def cases(self) -> list[Case]:
        """All cases, by suite and M: some competitors are prepared for both together."""
        return [
            case
            for suite in self.suites
            for M in sorted(set(self.Ms), reverse=True)
            for pattern in self.patterns
            for case in suites.cases(suite, pattern, (M,), self.tp, self.scale)
        ]

    def check(self) -> None:
        """`BadInput` for what cannot be measured, before any rank is started."""
        cases = self.cases()
        if not cases:
            raise BadInput(f"no case of {self.suites} has a pattern of {self.patterns}")
        if self.device == "cpu":
            sizes = ((case.M, case.N_local, case.K_local) for case in cases)
            machine.check_interpreted(sizes, f"--scale {CPU_SCALE} and a smaller --M fit")

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def loads(text: str) -> Options:
        """Lists of JSON become tuples again."""
        values: dict[str, Any] = json.loads(text)
        tuples = {name: tuple(v) for name, v in values.items() if isinstance(v, list)}
        return Options(**values | tuples)

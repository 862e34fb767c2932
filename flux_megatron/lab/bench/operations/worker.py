"""One rank: `python -m flux_megatron.lab.bench.operations.worker OPTIONS`, by `launch` or torchrun.

OPTIONS is `OperationOptions` as JSON.
"""

from __future__ import annotations

import faulthandler
import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path

from flux_megatron.errors import BadInput
from flux_megatron.lab.bench.operations import NAMES
from flux_megatron.lab.bench.worker import joined
from flux_megatron.tune_command.rank_processes import as_rank

GRACE_S = 15


@dataclass(frozen=True)
class OperationOptions:
    """What to measure: `names` of `operations.NAMES`, and of those the cases whose text has `only`.

    After `time_limit_s` no further case is started; soon afterwards the process ends.
    """

    names: tuple[str, ...]
    out: str
    only: str = ""
    rounds: int = 12
    tp: int = 2
    device: str = "cuda"
    time_limit_s: float | None = None
    nvls: bool = False
    commit: str = ""

    def __post_init__(self) -> None:
        if unknown := [name for name in self.names if name not in NAMES]:
            raise BadInput(f"operations {unknown} given, some of {NAMES} expected")

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def loads(text: str) -> OperationOptions:
        values = json.loads(text)
        return OperationOptions(**values | {"names": tuple(values["names"])})


def main(options: OperationOptions) -> None:
    """Measure as rank RANK of WORLD_SIZE (torchrun's variables)."""
    import torch

    from flux_megatron.lab.bench import provenance
    from flux_megatron.lab.bench.table_run import Run

    limit_s = math.inf if options.time_limit_s is None else options.time_limit_s
    if options.time_limit_s is not None:
        faulthandler.dump_traceback_later(limit_s + GRACE_S, exit=True)
    with joined(options) as (group, device):
        about = provenance.describe(
            device, group.size(), torch.bfloat16, 1, options.nvls, options.commit
        )
        end_s = time.monotonic() + limit_s
        measure(Run(group, device, about, Path(options.out), end_s), options)


def measure(run, options: OperationOptions) -> None:
    """Verify and measure each operation. `ArithmeticError`, on every rank, for a wrong result."""
    modules = [
        import_module(f"flux_megatron.lab.bench.operations.{name}") for name in options.names
    ]
    cases = [[c for c in module.cases(run) if options.only in str(c)] for module in modules]
    if not any(cases):
        known = "; ".join(str(case) for module in modules for case in module.cases(run))
        raise BadInput(f"--only {options.only!r} given, a part of one of these expected: {known}")
    for name, module, some in zip(options.names, modules, cases, strict=True):
        if said := module.verify(run):
            raise ArithmeticError(f"{name}: {said}")
        for case in some:
            if run.time_left():
                module.measure(run, case, options.rounds)


if __name__ == "__main__":
    as_rank(main, OperationOptions.loads(sys.argv[1]), "bench operations")

"""One rank: `python -m flux_megatron.lab.bench.operations.worker OPTIONS`, by `launch` or torchrun.

OPTIONS is `OperationOptions` as JSON.
"""

from __future__ import annotations

import faulthandler
import math
import sys
import time
from importlib import import_module
from pathlib import Path

from flux_megatron.errors import BadInput
from flux_megatron.lab.bench.options import OperationOptions
from flux_megatron.lab.bench.worker import joined
from flux_megatron.tune_command.rank_processes import as_rank

GRACE_S = 15


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
    """Measure the cases. `ArithmeticError`, on every rank, for a wrong result."""
    import torch

    from flux_megatron.symm.workspace import release

    folder = "flux_megatron.lab.bench.operations"
    modules = [import_module(f"{folder}.{name}") for name in options.names]
    cases = [[c for c in module.cases(run) if options.only in str(c)] for module in modules]
    if not any(cases):
        known = "; ".join(str(case) for module in modules for case in module.cases(run))
        raise BadInput(f"--only {options.only!r} given, a part of one of these expected: {known}")
    for name, module, some in zip(options.names, modules, cases, strict=True):
        for case in some:
            if run.time_left():
                try:
                    module.measure(run, case, options.rounds)
                except ArithmeticError as error:
                    raise ArithmeticError(f"{name}, {case}: {error}") from None
                release(graphs_dropped=True)  # symmetric memory of the next size
                if run.device.type == "cuda":
                    torch.cuda.empty_cache()


if __name__ == "__main__":
    as_rank(main, OperationOptions.loads(sys.argv[1]), "bench operations")

"""Operations that are no linear layer of a training run, each beside its unfused baseline:
`flux-megatron bench operations`.

A module a name of `options.OPERATIONS`, with `cases(run)` and `measure(run, case, rounds)`, which
verifies the case, then writes rows of a table of its own. Both are collective.
"""

from __future__ import annotations

import faulthandler
from importlib import import_module

from flux_megatron.errors import BadInput
from flux_megatron.lab.bench.options import OperationOptions
from flux_megatron.lab.bench.table_run import Run

GRACE_S = 15


def measure_all(options: OperationOptions, run: Run) -> None:
    """Measure the cases. `ArithmeticError`, on every rank, for a wrong result."""
    import torch

    from flux_megatron.symm.workspace import release

    if options.time_limit_s is not None:
        faulthandler.dump_traceback_later(options.time_limit_s + GRACE_S, exit=True)
    modules = [import_module(f"{__name__}.{name}") for name in options.names]
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

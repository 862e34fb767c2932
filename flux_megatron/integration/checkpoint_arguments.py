"""Arguments that Megatron takes out of a checkpoint, by --use-checkpoint-args or because a script
wants them: they are looked at like those of the command line.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from flux_megatron.integration import replaced
from flux_megatron.integration.arguments import PARSER

LOADS = "load_args_from_checkpoint"


def then(act: Callable[[Any], None]) -> None:
    """Call `act` with all arguments as soon as some have come out of a checkpoint.

    Where it raises `ValueError` the process ends with status 2, on every rank: each reads the
    checkpoint. Another call changes nothing, nor does one without Megatron's training loop.
    """
    if PARSER not in sys.modules:
        return
    for name in replaced.row(LOADS).where:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as missing:
            if missing.name != name:
                raise
            continue
        if hasattr(module, LOADS):
            _act_behind(module, act)


def _act_behind(module: Any, act: Callable[[Any], None]) -> None:
    @replaced.around(module, LOADS)
    def acting(original: Callable[..., Any], args: Any, *given: Any, **named: Any) -> Any:
        result = original(args, *given, **named)
        try:
            act(args)
        except ValueError as error:
            print(f"{sys.argv[0]}: with arguments of the checkpoint, {error}", file=sys.stderr)
            raise SystemExit(2) from None
        return result

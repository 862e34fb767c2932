"""One rank of a run: the user's script through our entry point, and what it leaves to compare."""

from __future__ import annotations

import argparse
import ast
import atexit
import contextlib
import faulthandler
import functools
import inspect
import signal
import sys
import traceback
import types
from pathlib import Path
from typing import Any

import fused_adam
import numpy
import torch

sys.path.append(str(Path(__file__).parents[1] / "integration"))
SCALARS = ("loss_scale", "skipped_iter", "grad_norm", "params_norm", "num_zeros_in_grad")
RECORD: dict[str, Any] = {"iterations": [], "evaluations": [], "state": {}}


def prepare(script: str, te: bool) -> None:
    """In the server: import what a run imports, as our launch with `--device cpu` does."""
    import runpy
    import typing

    from flux_megatron.lab.cpu import pretend_gpu

    if not hasattr(typing, "override"):  # newer than Python 3.11, which 0.17 and newer ask for
        typing.override = lambda method: method  # type: ignore[attr-defined]
    pretend_gpu()
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="imported")
    from megatron.core.datasets import helpers_cpp, utils  # noqa: F401, it is compiled already

    import flux_megatron.integration.install  # noqa: F401

    utils.compile_helpers = lambda: None
    _read_sources_once()
    _old_names()
    _spawn_without_main()
    fused_adam.install()
    if te:
        import te_stand_ins

        te_stand_ins.pretend_te()


def _spawn_without_main() -> None:
    """Processes that checkpointing spawns need not import the script, which takes seconds."""
    from multiprocessing import spawn

    prepare = spawn.get_preparation_data

    def prepared(name: str) -> dict[str, Any]:
        return {k: v for k, v in prepare(name).items() if not k.startswith("init_main")}

    spawn.get_preparation_data = prepared


def _old_names() -> None:
    """What some releases ask for where TransformerEngine is not, or NumPy is newer."""
    from megatron.core.tensor_parallel import random as checkpointing

    if not hasattr(checkpointing, "FP8GlobalStateManager"):
        checkpointing.FP8GlobalStateManager = types.SimpleNamespace(is_fp8_enabled=lambda: False)
        for name in ("activation_recompute_forward", "fp8_autocast"):
            setattr(checkpointing, name, lambda **_: contextlib.nullcontext())
    numpy.product = numpy.prod  # type: ignore[attr-defined]


def _read_sources_once() -> None:
    """Newer parsers read the sources of their classes for help texts, three times a run."""
    from megatron.training import arguments

    inspect.getsource = functools.cache(inspect.getsource)
    ast.parse = functools.cache(ast.parse)
    arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def main(script: str, run: Any, number: int) -> int:
    """In the child; the exit status."""
    faulthandler.register(signal.SIGUSR1)
    code = 0
    try:
        _enter(script, run.arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    if code == 0:
        RECORD["calls"] = _calls()
        torch.save(RECORD, f"{run.folder}/{number}.pt")
    atexit._run_exitfuncs()
    return code


def _enter(script: str, arguments: list[str]) -> None:
    from megatron.training import training

    from flux_megatron.integration import bootstrap

    bootstrap.enter(script, arguments)
    for name, hook in (("training_log", _logged), ("evaluate", _evaluated), ("train", _trained)):
        setattr(training, name, hook(getattr(training, name)))
    bootstrap.run()


def _logged(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def training_log(*given: Any, **named: Any) -> Any:
        arguments = signature.bind(*given, **named).arguments
        losses = {name: _number(value) for name, value in arguments["loss_dict"].items()}
        scalars = {name: _number(arguments.get(name)) for name in SCALARS}
        RECORD["iterations"].append({"iteration": arguments["iteration"], **losses, **scalars})
        return original(*given, **named)

    return training_log


def _evaluated(original: Any) -> Any:
    @functools.wraps(original)
    def evaluate(*given: Any, **named: Any) -> Any:
        result = original(*given, **named)
        RECORD["evaluations"].append({k: _number(v) for k, v in (result[0] or {}).items()})
        return result

    return evaluate


def _trained(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def train(*given: Any, **named: Any) -> Any:
        arguments = signature.bind(*given, **named).arguments
        try:
            return original(*given, **named)
        finally:
            RECORD["state"] = _state(arguments["model"], arguments["optimizer"])

    return train


def _state(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Parameters by their names; moments and main parameters by their place in the optimizer."""
    state = {
        f"chunk {number} {name}": parameter.detach().clone()
        for number, chunk in enumerate(model)
        for name, parameter in chunk.named_parameters()
    }
    for number, one in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
        inner = getattr(one, "optimizer", None)
        for group, entry in enumerate(getattr(inner, "param_groups", ())):
            for place, parameter in enumerate(entry["params"]):
                at = f"optimizer {number} group {group} parameter {place}"
                state[at] = parameter.detach().clone()
                for name, value in inner.state.get(parameter, {}).items():
                    state[f"{at} {name}"] = torch.as_tensor(value).detach().clone()
    return state


def _calls() -> dict[str, Any]:
    import flux_megatron

    report = flux_megatron.report()
    return {
        "total": report.total, "overlapped": report.overlapped,
        "fallbacks": {f"{p}: {why}": n for (p, why), n in report.fallbacks.items()},
    }  # fmt: skip


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        value = value.detach().double()
        return float(value if value.numel() == 1 else value.flatten()[0])
    return None if value is None else float(value)

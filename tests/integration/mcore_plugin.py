"""pytest plug-in: Megatron-LM's own unit tests with its two layer classes replaced by ours.

    cd <Megatron-LM>; torchrun --nproc-per-node 8 -m pytest -p mcore_plugin --layers flux ...

Without a GPU the tests get gloo for NCCL and CPU tensors for CUDA ones; those that need a real GPU
fail there with stock layers too. Each rank writes what became of every test to
`--outcomes`/<rank>.json.
"""

from __future__ import annotations

import json
import os
import sys
import types
import typing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

OUTCOMES: dict[str, str] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--layers", choices=["flux", "stock"], default="flux")
    parser.addoption("--outcomes", type=Path, default=None)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    if not hasattr(typing, "override"):  # Megatron 0.17 and newer ask for Python 3.12's
        typing.override = lambda method: method
    _without_download()
    if not torch.cuda.is_available():
        _on_cpu()


def pytest_collection_finish(session: pytest.Session) -> None:
    """By now the test modules have imported the names that are to be rebound."""
    if session.config.getoption("--layers") == "flux":
        assert _rebind_layers(), "no module of this checkout has the layer classes"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        OUTCOMES[report.nodeid] = report.outcome


def pytest_sessionfinish(session: pytest.Session) -> None:
    folder = session.config.getoption("--outcomes")
    if folder is not None:
        (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(OUTCOMES))


def _without_download() -> None:
    """The suite's conftest fetches data sets through this module; its layer tests read none."""
    name = "tests.test_utils.python_scripts.download_unit_tests_dataset"
    module = types.ModuleType(name)
    module.download_and_extract_asset = lambda *args, **kwargs: None
    sys.modules[name] = module


def _on_cpu() -> None:
    from megatron.core import parallel_state, utils
    from packaging.version import Version

    from flux_megatron.train.cpu_device import pretend_cuda

    pretend_cuda()
    torch.cuda.set_device = lambda *args: None
    torch.cuda.device_count = lambda: 8
    torch.cuda.is_available = lambda: True  # or the tests of the layers are skipped
    # up to 0.16 the absent Transformer Engine has the version None, which is compared
    utils.get_te_version = lambda: Version("0")
    dist.init_process_group = _gloo(dist.init_process_group)
    parallel_state.destroy_model_parallel = _with_groups(parallel_state.destroy_model_parallel)


def _gloo(init_process_group):
    def init(backend=None, *args, **kwargs):
        return init_process_group("gloo" if backend == "nccl" else backend, *args, **kwargs)

    return init


def _with_groups(destroy_model_parallel):
    """The suite forgets its process groups by the dozen; each gloo group keeps threads awake."""

    def destroy():
        destroy_model_parallel()
        if dist.is_initialized():
            for group in list(dist.distributed_c10d._world.pg_map):
                if group is not dist.group.WORLD:
                    dist.destroy_process_group(group)

    return destroy


def _rebind_layers() -> int:
    """Everywhere but in layers.py, whose constructors find their parent class by these names."""
    from megatron.core.tensor_parallel import layers

    from flux_megatron.integration import FluxColumnParallelLinear, FluxRowParallelLinear

    new = {
        layers.ColumnParallelLinear: FluxColumnParallelLinear,
        layers.RowParallelLinear: FluxRowParallelLinear,
    }
    rebound = 0
    for module in list(sys.modules.values()):
        package = getattr(module, "__name__", "").split(".")[0]
        if module is layers or package not in ("megatron", "tests"):
            continue
        for name, value in list(vars(module).items()):
            if isinstance(value, type) and value in new:
                setattr(module, name, new[value])
                rebound += 1
    return rebound

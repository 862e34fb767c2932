"""pytest plug-in: Megatron-LM's own unit tests with its linear layers replaced by ours.

mcore_suite.py runs them with it in several ranks. On CPU with gloo for NCCL, CPU tensors for CUDA
ones, and stand-ins for TransformerEngine's classes; what needs more fails with stock layers too.
With `--gpus` nothing is stood in, and NCCL's waits are bounded as gloo's are.
Each rank tells of every test in `--outcomes`/<rank>.jsonl: how it ended, and how often our layers
ran forward.

Ranks stay together: a test is over when it is over on all of them, and after one that failed
anywhere all end, since nobody knows which collectives are still open.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import os
import sys
import time
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

PATIENCE_S = 40.0  # for collectives, and for the other ranks after a test
COUNTS: Counter[str] = Counter()
_ours = contextlib.ExitStack()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--layers", choices=["flux", "stock"], default="flux")
    parser.addoption("--gpus", action="store_true")
    parser.addoption("--outcomes", type=Path, required=True)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    _without_download()
    if early_config.known_args_namespace.gpus:
        _bounded_nccl()
    else:
        _bounded_gloo()


def pytest_collection_finish(session: pytest.Session) -> None:
    """By now the test modules have imported the names that are to be rebound."""
    if session.config.getoption("--layers") == "flux":
        _build_ours()
        _count_ours()


class Ranks:
    """What this rank has reported, and what the others have."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, int(os.environ["RANK"])
        self.reported = 0

    def tell(self, **line: Any) -> None:
        with (self.folder / f"{self.number}.jsonl").open("a") as stream:
            stream.write(json.dumps(line) + "\n")
        self.reported += 1

    def all_passed(self) -> bool:
        """Wait until the others have reported as much; whether no test failed on any."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            lines = [lines_of(self.folder, rank) for rank in range(int(os.environ["WORLD_SIZE"]))]
            if any(line["outcome"] == "failed" for rank in lines for line in rank):
                return False
            if min(map(len, lines)) >= self.reported:
                return True
            time.sleep(0.01)
        return False


def lines_of(folder: Path, rank: int) -> list[dict[str, Any]]:
    file = folder / f"{rank}.jsonl"
    if not file.exists():
        return []
    whole = [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [json.loads(line) for line in whole]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """One line when a test starts, one with its outcome when it is over."""
    ranks = _ranks(item.config.getoption("--outcomes"))
    ranks.tell(test=item.nodeid, outcome="started")
    COUNTS.clear()
    item.stash[_OUTCOMES] = []
    result = yield
    outcomes = item.stash[_OUTCOMES]
    outcome = next((o for o in ("failed", "skipped") if o in outcomes), "passed")
    ranks.tell(test=item.nodeid, outcome=outcome, **COUNTS)
    if not ranks.all_passed():
        pytest.exit("a test failed on some rank", returncode=0)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    item.stash[_OUTCOMES].append(report.outcome)
    return report


_OUTCOMES = pytest.StashKey[list[str]]()
_ranks = functools.cache(Ranks)


def _without_download() -> None:
    """The suite's conftest fetches data sets through this module; the tests we run read none."""
    name = "tests.test_utils.python_scripts.download_unit_tests_dataset"
    module: Any = types.ModuleType(name)
    module.download_and_extract_asset = lambda *args, **kwargs: None
    sys.modules[name] = module


def _bounded_nccl() -> None:
    """Collectives that wait for a rank which failed end their process."""
    limit = datetime.timedelta(seconds=PATIENCE_S)
    for name in ("init_process_group", "new_group"):
        original = getattr(dist, name)

        @functools.wraps(original)
        def bounded(*given: Any, original: Any = original, **named: Any) -> Any:
            return original(*given, **{**named, "timeout": limit})

        setattr(dist, name, bounded)


def _bounded_gloo() -> None:
    """Gloo for NCCL; collectives that wait for a rank which failed are given up.

    Each gloo group keeps threads awake, and Megatron makes dozens, most of the same ranks as
    others: those are made once. The suite forgets its groups; here they go with the model-parallel
    state.
    """
    from megatron.core import parallel_state

    limit, groups = datetime.timedelta(seconds=PATIENCE_S), {}
    init_process_group, make = dist.init_process_group, dist.new_group
    destroy_model_parallel = parallel_state.destroy_model_parallel

    def init(backend: Any = None, *given: Any, **named: Any) -> None:
        gloo = "gloo" if backend == "nccl" else backend
        init_process_group(gloo, *given, **{**named, "timeout": limit})

    def new_group(ranks: Any = None, *_: Any, **__: Any) -> Any:
        key = tuple(range(dist.get_world_size()) if ranks is None else ranks)
        if key not in groups:
            groups[key] = make(key, timeout=limit, backend="gloo")
        return groups[key]

    def destroy() -> None:
        destroy_model_parallel()
        groups.clear()
        if dist.is_initialized():
            for group in list(dist.distributed_c10d._world.pg_map):
                if group is not dist.group.WORLD:
                    dist.destroy_process_group(group)

    dist.init_process_group, dist.new_group = init, new_group
    parallel_state.destroy_model_parallel = destroy


def _build_ours() -> None:
    """As a launch does it."""
    from flux_megatron.integration import building, install
    from flux_megatron.integration.provider import StockSpecProvider

    install.build_from(StockSpecProvider)
    _ours.enter_context(building.norms())
    _ours.enter_context(building.linears(experts=True))


def _count_ours() -> None:
    from flux_megatron.integration.layers import FluxColumnParallelLinear, FluxRowParallelLinear

    for layer in (FluxColumnParallelLinear, FluxRowParallelLinear):
        layer.forward = _counted(layer.forward)  # type: ignore[method-assign]


def _counted(original: Any) -> Any:
    @functools.wraps(original)
    def forward(*given: Any, **named: Any) -> Any:
        COUNTS["forwards"] += 1
        return original(*given, **named)

    return forward

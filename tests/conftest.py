"""One mode a process: without a GPU the kernels are interpreted, which Triton decides at its first
import. And how `scripts/test.sh` may spread the tests.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("FLUX_MEGATRON_TIMEOUT_S", "20")
os.environ.setdefault("FLUX_MEGATRON_POISON", "1")
os.environ.setdefault("FLUX_MEGATRON_TUNE", "off")  # what is asked, not what is fastest
# not every machine survives multicast objects
for _name in ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS", "UB_SKIPMC"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
# what the user has measured does not count here, and nothing is added to it
_cache = tempfile.TemporaryDirectory(prefix="flux_megatron-")
os.environ["FLUX_MEGATRON_CACHE"] = _cache.name
# commands find this checkout from whatever folder they are started in, installed or not, and begin
# as `processes/sitecustomize.py` says
_ours = [str(Path(__file__).parents[1]), str(Path(__file__).with_name("processes"))]
_paths = [*_ours, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
os.environ["PYTHONPATH"] = os.pathsep.join(path for path in dict.fromkeys(_paths) if path)

import extras  # noqa: E402
import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

# no time limit an example: on two shared cores any line may take a second
hypothesis.settings.register_profile("flux_megatron", deadline=None)
hypothesis.settings.load_profile("flux_megatron")

pytest.register_assert_rewrite("fake_engines")  # a plugin of two files, which import it first

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)

# files whose tests share what is slow to make: compiled kernels, rows, losses, a wheel, a Slurm
ONE_WORKER = (
    "test_hopper_ptx", "test_ptx", "test_row_kernels", "test_expert_ptx", "test_embedding_ptx",
    "test_word_ptx", "test_device_ptx", "test_sample_ptx", "test_kept_code", "test_bench_runs",
    "test_gpt_model", "test_generate", "test_compiled_layers", "test_wheel", "test_simulate",
    "test_slurm_jobs", "test_slurm_faults", "test_offline_calls",
)  # fmt: skip
# files of few long tests, which come last in the order of names: one alone would be waited for
FIRST = ("test_train_runs", "test_tuner_command", "test_tuner", "test_wheel")
# files with bounds on seconds: beside other tests they would measure those
ALONE = ("test_bad_inputs", "test_timing")
# what makes a call, beside its kernels
_ROOMS = ("overlap/", "symm/", "expert_parallel/", "embedding/", "device/")
_CALLS = (*_ROOMS, "problem.py", "patterns.py", "scaling.py", "lab/reference.py")
_KINDS = ("", "device_", "embedding_", "signalled_expert_", "token_")  # of lists of mutants
# files that take minutes, which scripts/test.sh leaves out, and what they are about: folders and
# files below tests/ and flux_megatron/ whose change brings them back, as their own does
WHOLE = {
    "test_mutants": (*_CALLS, *(f"protocol/{kind}mutants.diff" for kind in _KINDS)),
    "test_virtual_ranks": _CALLS,
    "test_word_ranks": _CALLS,
    "test_offline_calls": (*_CALLS, "nn/", "dispatch.py", "ops.py", "operators.py", "pieces.py"),
    "test_row_kernels": (),
    "test_ptx": (),
    "test_hopper_ptx": (),
    "test_expert_ptx": (),
    "test_embedding_ptx": (),
    "test_word_ptx": (),
    "test_device_ptx": ("device/",),
    "test_hopper_ranks": ("overlap/", "symm/", "expert_parallel/", "kernels/experts/"),
    "test_slurm_jobs": ("slurm/", "launch/"),
    "test_slurm_faults": ("slurm/", "launch/"),
    "test_train_runs": ("lab/train/", "symm/"),
    "test_in_small": ("lab/measure/", "lab/bench/"),
    "test_differential": ("differential/",),
}
# the files that have changed and the mutants that are new, one a line; unset: nobody asked, so
# nothing is left out for it
CHANGED = frozenset(os.environ["CHANGED"].splitlines()) if "CHANGED" in os.environ else None
_left_out: dict[str, int] = {}


def pytest_unconfigure() -> None:
    """Workers end without the end of the interpreter, which would do it."""
    _cache.cleanup()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Of a run of the tests that are alone: the other files, whose imports take a quarter of it."""
    alone = config.option.markexpr == "alone"
    others = collection_path.suffix == ".py" and collection_path.stem not in ALONE
    return True if alone and others else None


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return extras.Module.from_parent(parent, path=module_path)


def pytest_itemcollected(item: pytest.Item) -> None:
    module = getattr(item, "module", None)
    if any(hasattr(module, name) for name in ("on_device", "on_device_ranks", "DEVICE")):
        item.add_marker("device")
    if item.path.stem in ONE_WORKER:
        item.add_marker(pytest.mark.xdist_group(item.path.stem))
    if item.path.stem in ALONE:
        item.add_marker("alone")
    if of_the_whole(item.path.stem, getattr(item, "callspec", None)):
        item.add_marker("whole")


def of_the_whole(file: str, callspec: Any, changed: frozenset[str] | None = CHANGED) -> bool:
    """Whether a test is of the whole suite alone: it takes minutes, or it is a mutant, and nothing
    that it is about has changed.
    """
    mutant = callspec.params.get("mutant") if callspec else None
    if mutant is None and file in WHOLE:
        about = tuple(f"{top}/{path}" for path in WHOLE[file] for top in ("tests", "flux_megatron"))
        own = f"/{file}.py"
        return not any(path.startswith(about) or path.endswith(own) for path in changed or ())
    if mutant is None or changed is None or mutant.name in changed:
        return False
    test, _, _ = getattr(mutant, "test", "").partition("::")
    about = [f"/{mutant.mutation.path}", f"/{test}"] if test else [f"/{mutant.mutation.path}"]
    return not any(path.endswith(tuple(about)) for path in changed)


def pytest_deselected(items: list[pytest.Item]) -> None:
    left_out = (item.path.stem for item in items if item.get_closest_marker("whole"))
    _left_out.update(Counter(left_out))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in FIRST)


def pytest_collection_finish() -> None:
    """What has been imported stays: no collection looks at it, here or in forked ranks."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(_left_out)
    if "rank_pool" in sys.modules:
        sys.modules["rank_pool"].stop_all()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every worker has left out the same."""
    _left_out.update(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _left_out and not hasattr(terminalreporter.config, "workerinput"):
        files = ", ".join(f"{file} ({count})" for file, count in sorted(_left_out.items()))
        terminalreporter.write_line(f"Left out, for scripts/test.sh --all: {files}")

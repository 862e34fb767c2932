"""`python tests/integration/mcore_suite.py --megatron CHECKOUT ... --out rows.jsonl`

Megatron-LM's own unit tests on CPU and gloo, with its layers and then, those that passed, with
ours: a row for each release and file of tests. mcore_plugin.py says what is replaced and counted.
Exits 1 if one of those fails with ours, or none ran through them.
With `--gpus` on GPUs and NCCL, by torchrun, with the TransformerEngine that is installed.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PATH = [str(HERE), str(HERE.parent / "differential")]
sys.path += PATH
FILES = (
    "tensor_parallel/test_*.py", "transformer/test_transformer_layer.py",
    "transformer/test_attention.py", "transformer/test_mlp.py",
    "transformer/test_multi_token_prediction.py", "transformer/moe/test_sequential_mlp.py",
    "models/test_gpt_model.py", "dist_checkpointing/models/test_gpt_model.py",
    "dist_checkpointing/test_optimizer.py", "pipeline_parallel/test_schedules.py",
)  # fmt: skip
LIMIT_S = 600.0  # of the ranks that were started for a file
Start = Callable[[list[str], int, Path], None]  # ranks, with arguments and a folder for outcomes
OPTIONS = (
    "-p", "mcore_plugin", "-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:timeout",
    "-p", "no:xdist", "-q", "-W", "ignore", "--assert=plain",
)  # fmt: skip

GPUS = ("--gpus",)  # of the plug-in


def row(
    checkout: Path, file: str, tests: list[str], ranks: int, work: Path, start: Start
) -> dict[str, Any]:
    """The file's tests with stock layers; of those that passed, with ours."""
    begun = time.monotonic()
    stock = outcomes(tests, "stock", ranks, work, start)
    passed = [test for test, line in stock.items() if line["outcome"] == "passed"]
    ours = outcomes(passed, "flux", ranks, work, start)
    lines = [ours.get(test, {"outcome": "missing"}) for test in passed]
    forwards = [line.get("forwards", 0) for line in lines]
    return {
        "table": "mcore_suite", "release": checkout.name, "file": file, "ranks": ranks,
        "tests": len(stock), "stock": len(passed),
        "ours": sum(line["outcome"] == "passed" for line in lines),
        "not_ours": [t for t, o in zip(passed, lines, strict=True) if o["outcome"] != "passed"],
        "tests_forwards": sum(map(bool, forwards)), "forwards": sum(forwards),
        "seconds": round(time.monotonic() - begun), "torch": importlib.metadata.version("torch"),
        "date": datetime.date.today().isoformat(), "git": _commit(),
    }  # fmt: skip


def outcomes(
    tests: list[str], layers: str, ranks: int, work: Path, start: Start
) -> dict[str, dict[str, Any]]:
    """Of each test: passed if it did on all ranks, with counts summed over them.

    Ranks end with a test that failed; others are then started for the rest.
    """
    found: dict[str, dict[str, Any]] = {}
    while rest := [test for test in tests if test not in found]:
        folder = Path(tempfile.mkdtemp(dir=work))
        start([layers, *rest], ranks, folder)
        found |= merged(folder, ranks) or {rest[0]: {"outcome": "failed"}}
    return found


def forked(arguments: list[str], ranks: int, folder: Path) -> None:
    """From this process, which has imported all that they need."""
    from server import Run, fork_ranks

    fork_ranks(Run(arguments, ranks, str(folder), LIMIT_S), _body)


def by_torchrun(arguments: list[str], ranks: int, folder: Path) -> None:
    """Each on a GPU of its own; what they print is in `folder`."""
    layers, *tests = arguments
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone",
         f"--nproc-per-node={ranks}", "--redirects=3", f"--log-dir={folder / 'logs'}",
         "-m", "pytest", *OPTIONS, *GPUS, f"--layers={layers}", f"--outcomes={folder}", *tests],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its ranks
        process.wait()


def merged(folder: Path, ranks: int) -> dict[str, dict[str, Any]]:
    """Of all ranks' lines; a test that started and did not end failed."""
    from mcore_plugin import lines_of

    found: dict[str, dict[str, Any]] = {}
    for rank in range(ranks):
        last = {line["test"]: line for line in lines_of(folder, rank)}
        for test, line in last.items():
            one = found.setdefault(test, {"outcome": "skipped"})
            one["forwards"] = one.get("forwards", 0) + line.get("forwards", 0)
            outcome = "failed" if line["outcome"] == "started" else line["outcome"]
            order = ("skipped", "passed", "failed")
            one["outcome"] = max(one["outcome"], outcome, key=order.index)
    return found


def _body(run: Any, rank: int) -> int:
    """In a forked rank."""
    from tests.unit_tests.test_utilities import Utils

    Utils.rank, Utils.world_size = rank, run.ranks  # read when it was imported
    faulthandler.register(signal.SIGUSR1)
    layers, *tests = run.arguments
    return int(pytest.main([*OPTIONS, "--layers", layers, f"--outcomes={run.folder}", *tests]))


def _stand_ins() -> None:
    """What tests import from absent packages, and Megatron's own rotary code as the fused one."""
    from megatron.core.models.common.embeddings import rope_utils

    def rotary(t: Any, freqs: Any, interleaved: bool = False, **_: Any) -> Any:
        return rope_utils._apply_rotary_pos_emb_bshd(t, freqs, rotary_interleaved=interleaved)

    rope_utils.fused_apply_rotary_pos_emb = rotary
    for name in ("transformer_engine", "transformer_engine.pytorch", "flash_attn"):
        sys.modules[name] = types.ModuleType(name)
    fp8: Any = types.ModuleType("transformer_engine.pytorch.fp8")
    fp8.check_fp8_support = lambda: (False, "no GPU")
    sys.modules[fp8.__name__] = fp8
    flash: Any = sys.modules["flash_attn"]
    flash.flash_attn_with_kvcache, flash.__version__ = None, "0"
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: "0" if name == "flash-attn" else version(name)


class _Collected:
    """A plug-in that keeps the names of the tests."""

    def __init__(self) -> None:
        self.tests: dict[str, list[str]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            self.tests.setdefault(item.nodeid.split("::")[0], []).append(item.nodeid)


def serve(
    checkout: Path, ranks: int, out: Path, files: list[str], keep: Path | None, gpus: bool
) -> int:
    """All files of one checkout, in a process of its own that has imported Megatron and them; its
    exit status.
    """
    os.chdir(checkout)
    os.environ["WORLD_SIZE"] = str(ranks)
    if not gpus:
        import rank

        rank.prepare("pretrain_gpt.py", te=True)
        _stand_ins()
    there = [str(p) for f in files for p in sorted(Path("tests/unit_tests").glob(f))]
    collected = _Collected()
    pytest.main([
        *OPTIONS, *(GPUS if gpus else ()), "--collect-only", "--continue-on-collection-errors",
        "--layers=stock", "--outcomes=.", *there,
    ], [collected])  # fmt: skip
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work:
        for file, tests in collected.tests.items():
            start = by_torchrun if gpus else forked
            made = row(checkout, file, tests, ranks, keep or Path(work), start)
            with out.open("a") as stream:
                stream.write(json.dumps(made) + "\n")
            print(json.dumps(made), flush=True)
            rows.append(made)
    return status_of(rows)


def status_of(rows: list[dict[str, Any]]) -> int:
    """1 where nothing is shown: no test ran through our layers, or one of stock's fails."""
    good = any(row["forwards"] for row in rows) and not any(row["not_ours"] for row in rows)
    return int(not good)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megatron", type=Path, nargs="+", required=True, metavar="CHECKOUT")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, appended to")
    parser.add_argument("--site", type=Path, help="folder of packages that Megatron needs")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--files", nargs="+", default=FILES, help="below tests/unit_tests")
    parser.add_argument("--keep", type=Path, help="folder that is there, for the logs of ranks")
    parser.add_argument("--gpus", action="store_true", help="a rank each, in place of CPUs")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser


def main() -> int:
    options = parser().parse_args()
    if options.serve:
        keep = options.keep and options.keep.resolve()
        checkout = options.megatron[0].resolve()
        return serve(checkout, options.ranks, options.out, options.files, keep, options.gpus)
    status = 0
    for checkout in options.megatron:
        command = [sys.executable, __file__, *sys.argv[1:], "--serve", "--megatron", str(checkout)]
        environment = _environment(checkout.resolve(), options.site, options.gpus)
        status |= subprocess.run(command, env=environment, check=False).returncode != 0
    return status


def _environment(checkout: Path, site: Path | None, gpus: bool) -> dict[str, str]:
    from server import environment, path_of

    if gpus:
        found = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        found["PYTHONPATH"] = path_of(checkout, site)
    else:
        found = environment(checkout, site) | {"FLUX_MEGATRON_STRATEGY": "pipelined"}
    found["PYTHONPATH"] = os.pathsep.join([found["PYTHONPATH"], *PATH])
    return found


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())

"""Processes that compile ahead, and whom they ask: each rank once for all ranges of a kind.

A kernel is compiled for a pretended GPU; the last test counts what training compiles on two.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import OWN_GPUS, here, on_cpu_ranks

from flux_megatron.kernels import compiled_ahead
from flux_megatron.kernels.triton_launch import Code
from flux_megatron.nn import ColumnParallelLinear, RowParallelLinear
from flux_megatron.patterns import Pattern
from flux_megatron.problem import Problem
from flux_megatron.tuning import ahead
from flux_megatron.tuning.plan_table import PlanTable

GPU = torch.device("cuda", 0)
OPTIONS = (("num_warps", 1), ("num_stages", 1))
KERNEL = """
import triton
import triton.language as tl

@triton.jit
def add_kernel(x, n, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(x + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)

@triton.jit
def wrong_kernel(x, n, SIZE: tl.constexpr):
    tl.static_assert(SIZE == 0)
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Triton's, empty, and a module of kernels."""
    (tmp_path / "small_kernels.py").write_text(KERNEL)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return tmp_path / "cache"


def code(kernel: str, size: int = 32) -> Code:
    return Code("small_kernels", kernel, (torch.float32, 3, size), OPTIONS)


def compiled(*codes: Code) -> list[str]:
    """The marks that they leave."""
    marks = [compiled_ahead.mark_of(one, "sources") for one in codes]
    process = compiled_ahead.start(codes, marks, 2, GPU)
    compiled_ahead.wait(process, 60)
    assert process.returncode == 0
    return [mark for mark in marks if compiled_ahead.is_marked(mark)]


def files(cache) -> dict[str, int]:
    return {str(file): file.stat().st_mtime_ns for file in cache.rglob("add_kernel.cubin")}


def test_a_kernel_is_compiled_once_a_machine(cache):
    assert compiled(code("add_kernel"))
    first = files(cache)
    assert len(first) == 1
    assert compiled(code("add_kernel"))
    assert files(cache) == first, "a second process finds it on disk"
    compiled(code("add_kernel", 64))
    assert len(files(cache)) == 2


def test_a_kernel_that_cannot_be_compiled_is_left_to_its_launch(cache, capfd):
    """Nobody tries again ahead, and the others of its process are compiled."""
    assert len(compiled(code("wrong_kernel"), code("add_kernel"))) == 2
    assert len(files(cache)) == 1
    assert "wrong_kernel" in capfd.readouterr().err


def test_a_mark_is_of_a_code_and_its_sources(cache):
    marks = [
        compiled_ahead.mark_of(code("add_kernel", size), sources)
        for size in (32, 64) for sources in ("these", "those")
    ]  # fmt: skip
    assert len({*marks}) == 4
    assert not any(map(compiled_ahead.is_marked, marks))


def test_a_late_process_is_ended():
    """And what it has forked, which holds the other end of the pipe."""
    forks = "import os, time; print(os.getpid(), flush=True); os.fork(); time.sleep(6)"
    given = {"stdout": subprocess.PIPE, "start_new_session": True}
    with subprocess.Popen([sys.executable, "-c", forks], **given) as process:
        process.stdout.readline()
        began = time.monotonic()
        compiled_ahead.wait(process, 0.2)
        assert process.wait(5) == -9
        assert process.stdout.read() == b""
    assert time.monotonic() - began < 5


def test_where_there_can_be_no_process_there_is_none(cache):
    with mock.patch.object(subprocess, "Popen", side_effect=OSError("no more processes")):
        assert compiled_ahead.start([code("add_kernel")], ["mark"], 1, GPU) is None


class Space:
    """A workspace, as far as compiling ahead asks it."""

    world_size, unavailable, device = 2, None, GPU

    def __init__(self, rank: int) -> None:
        self.group = SimpleNamespace(rank=lambda: rank)
        self.agreed: dict = {}
        self.agreement = mock.Mock()


def codes_of(problem: Problem, *given: object) -> list[Code]:
    return [code(problem.layout, one) for one in range(5)]


def test_a_group_asks_once_for_a_kind_and_its_ranges():
    """Ranks share the codes, and each waits for all."""
    problem = Problem(Pattern.AG_GEMM, 4096, 1024, 1024, "bfloat16", 2)
    parts = []
    for rank in range(2):
        space, started = Space(rank), []

        def start(codes, marks, at_once, device, started=started):
            started.extend(codes)

        with (
            mock.patch.object(ahead, "_asked", set()),
            mock.patch.object(ahead, "_codes", lambda kinds, *given: codes_of(next(iter(kinds)))),
            mock.patch.object(compiled_ahead, "is_marked", return_value=False),
            mock.patch.object(compiled_ahead, "start", start),
            mock.patch.object(ahead, "timeout_s", return_value=60),
            mock.patch.object(ahead, "sources_digest", return_value="sources"),
        ):
            for M, ranges in ((4096, (10, 11)), (4096, (10, 11)), (724, (11,)), (300, (8,))):
                ahead.compile_kinds(replace(problem, M=M), ranges, PlanTable(), space)
        assert space.agreement.confirm.call_count == 2
        assert len({*started}) == len(started), "no code is compiled twice"
        parts.append({*started})
    assert not parts[0] & parts[1]
    assert len(parts[0] | parts[1]) == 10


def test_layers_around_one_of_fp8_have_its_layout():
    """No kernel takes w [K, N] of FP8: each try took seconds, and a thousand lines of a log."""
    problem = Problem(Pattern.AG_GEMM, 4096, 1024, 1024, "bfloat16", 2)
    scaled = replace(problem, dtype="float8_e4m3fn", out_dtype="bfloat16")
    assert {one.layout for one in ahead._around(problem)} == {"nt", "nn"}
    around = ahead._around(scaled)
    assert {one.layout for one in around} == {"nt"}
    patterns = {Pattern.AG_GEMM, Pattern.GEMM_RS}
    assert {one.pattern for one in around} == patterns
    gradients = [one for one in around if one.split_accumulator]
    assert {one.pattern for one in gradients} == patterns
    assert {one.dtype for one in gradients} == {"float8_e5m2"}
    assert {one.dtype for one in {*around} - {*gradients}} == {"float8_e4m3fn"}
    for other in ({"blockwise": True, "split_accumulator": True}, {"split_accumulator": True}):
        assert len({one.dtype for one in ahead._around(replace(scaled, **other))}) == 1


ON = {
    "FLUX_MEGATRON_TUNE": "on",
    "FLUX_MEGATRON_TUNE_SECONDS": "3",
    "FLUX_MEGATRON_CACHE": "{tmp_path}/plans",
    "TRITON_CACHE_DIR": "{tmp_path}/kernels",
    "FLUX_MEGATRON_TIMEOUT_S": "200",  # half of it bounds compiling, beside a whole suite too
}


@pytest.mark.gpus(2)
@OWN_GPUS
@on_cpu_ranks(2, device="cuda", environment=ON, fresh=True, limit_s=240)
def test_training_compiles_nothing_after_its_first_step(rank):
    import triton

    group, made = dist.group.WORLD, {"device": here(), "dtype": torch.bfloat16}
    layers = [
        ColumnParallelLinear(2048, 4096, group=group, **made),
        RowParallelLinear(4096, 2048, group=group, **made),
    ]
    compiled_here: list[str] = []

    def step(M: int) -> None:
        x = torch.randn(M // 2, 2048, requires_grad=True, **made)
        for layer in layers:
            x = layer(x)
        x.sum().backward()
        torch.cuda.synchronize()

    def listen(*, src, cache_hit: bool, **more: object) -> None:
        if not cache_hit:
            compiled_here.append(src.name)

    step(4096)
    triton.knobs.compilation.listener = listen
    try:
        drawn = random.Random(58)
        for _ in range(12):
            step(2 * drawn.randint(363, 10_000))
    finally:
        triton.knobs.compilation.listener = None
    assert not compiled_here, compiled_here

"""`hopper` says why it cannot run, and the next strategy does: on Blackwell, and with a Triton that
cannot compile its kernels. A GPU and a compiler stand in.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import triton
from triton.compiler.errors import CompilationError

pytest.importorskip("flux_megatron.kernels.hopper_probe")

from flux_megatron.kernels import hopper_config, hopper_gemm, hopper_probe, triton_launch
from flux_megatron.overlap import registry
from flux_megatron.problem import Pattern, Problem
from flux_megatron.versions.triton import TRITON

PROBLEM = Problem(Pattern.AG_GEMM, 8192, 8192, 8192, "bfloat16", world_size=4, device="cuda")
ASKED = (hopper_gemm.refuses_bands, hopper_gemm._not_compiled)


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """A Hopper GPU, and kernels that are compiled."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    for cached in ASKED:
        cached.cache_clear()
    yield monkeypatch
    for cached in ASKED:
        cached.cache_clear()


def strategies() -> tuple[list[str], str | None]:
    names, _ = registry.overlapping(PROBLEM, "auto", None)
    return names, registry.refusal(PROBLEM, "hopper", None)


def bands() -> str | None:
    return hopper_gemm.refuses_bands(
        "cuda", torch.bfloat16, 64, 64, 1, (), hopper_config.TILE
    )  # fmt: skip


def test_hopper_comes_first_on_hopper():
    names, reason = strategies()
    assert (names[0], reason, bands()) == ("hopper", None, None)


def test_hopper_kernels_refuse_blackwell(gpu):
    gpu.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    names, reason = strategies()
    assert names[0] == "fused"
    assert "hopper" not in names
    assert reason == bands() == hopper_gemm.refuses_experts("cuda", torch.bfloat16, 64, 64, "nt")
    assert reason == "Hopper kernels need a GPU of compute capability 9, this one has 10.0"


@pytest.fixture
def untested_triton(gpu):
    newer = dataclasses.replace(TRITON, newest="3.5")
    gpu.setattr(hopper_gemm, "TRITON", newer)
    return gpu


def test_what_an_untested_triton_cannot_compile_is_refused(untested_triton):
    def compile_kernels() -> None:
        raise CompilationError("", None, "no async_load here")

    untested_triton.setattr(hopper_probe, "compile_kernels", compile_kernels)
    names, reason = strategies()
    assert names[0] == "fused"
    assert reason.startswith("this Triton cannot compile the Hopper kernels (")
    assert reason == bands()


def test_what_it_compiles_runs(untested_triton):
    compiled = []
    untested_triton.setattr(hopper_probe, "compile_kernels", lambda: compiled.append(1))
    assert [strategies()[0][0], strategies()[0][0], bands()] == ["hopper", "hopper", None]
    assert compiled == [1]


def test_what_was_run_is_not_asked(gpu):
    gpu.setattr(hopper_probe, "compile_kernels", lambda: pytest.fail("compiled"))
    assert strategies()[0][0] == "hopper"


def test_the_probe_asks_for_three_kernels_and_runs_none(monkeypatch):
    asked = []

    def called(launcher, tensors, numbers, grid) -> None:
        asked.append((launcher.name, triton_launch._compiling))

    monkeypatch.setattr(triton_launch.Launcher, "launch", called)
    hopper_probe.compile_kernels("cpu")
    assert {*asked} == {
        (f"hopper_{name}", True) for name in ("ag_gemm", "signalled_gemm", "gemm_rs")
    }
    assert not triton_launch._compiling

"""`hopper` says why it cannot run, and the next strategy does: on Blackwell, and with a Triton that
cannot compile its kernels. A GPU and a compiler stand in.
"""

import dataclasses
import sys
from unittest import mock

import pytest
import torch
import triton
from triton.compiler.errors import CompilationError

pytest.importorskip("flux_megatron.kernels.hopper.probe")

from flux_megatron.kernels import hopper, triton_launch
from flux_megatron.kernels.hopper import config as hopper_config
from flux_megatron.kernels.hopper import gemm as hopper_gemm
from flux_megatron.kernels.hopper import probe as hopper_probe
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


def first_strategy() -> tuple[str, str | None]:
    """And why `hopper` cannot run, which its kernels for bands say too."""
    names = [*registry.runnable(PROBLEM, "auto", None)]
    reason = registry.refusal(PROBLEM, "hopper", None)
    assert ("hopper" in names) == (reason is None)
    tile = hopper_config.TILE
    assert reason == hopper_gemm.refuses_bands("cuda", torch.bfloat16, 64, 64, 1, (), tile)
    return names[0], reason


def test_hopper_kernels_refuse_blackwell(gpu):
    gpu.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    reason = "Hopper kernels need a GPU of compute capability 9, this one has 10.0"
    assert first_strategy() == ("fused", reason)
    assert hopper_gemm.refuses_experts("cuda", torch.bfloat16, 64, 64, "nt") == reason


@pytest.fixture
def untested_triton(gpu):
    newer = dataclasses.replace(TRITON, newest="3.5")
    gpu.setattr(hopper_gemm, "TRITON", newer)
    return gpu


def test_what_an_untested_triton_cannot_compile_is_refused(untested_triton):
    fails = mock.Mock(side_effect=CompilationError("", None, "no async_load here"))
    untested_triton.setattr(hopper_probe, "compile_kernels", fails)
    name, reason = first_strategy()
    assert name == "fused"
    assert reason.startswith("this Triton cannot compile the Hopper kernels (")


def test_an_untested_triton_whose_gluon_lacks_a_name_is_refused(untested_triton):
    untested_triton.delattr(hopper, "probe")
    untested_triton.setitem(sys.modules, hopper_probe.__name__, None)
    name, reason = first_strategy()
    assert name == "fused"
    assert reason.startswith("this Triton cannot compile the Hopper kernels (")


def test_what_it_compiles_runs(untested_triton):
    compile_kernels = mock.Mock()
    untested_triton.setattr(hopper_probe, "compile_kernels", compile_kernels)
    assert [first_strategy(), first_strategy()] == [("hopper", None)] * 2
    compile_kernels.assert_called_once_with()


def test_what_was_run_is_not_asked(gpu):
    gpu.setattr(hopper_probe, "compile_kernels", lambda: pytest.fail("compiled"))
    assert first_strategy() == ("hopper", None)


def test_the_probe_asks_for_three_kernels_and_runs_none(monkeypatch):
    asked = []
    monkeypatch.setattr(triton_launch.Code, "compiled", lambda code: asked.append(code.kernel))
    hopper_probe.compile_kernels("cpu")
    assert {*asked} == {
        f"hopper_{name}_kernel" for name in ("ag_gemm", "signalled_gemm", "gemm_rs")
    }

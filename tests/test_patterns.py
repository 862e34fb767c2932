"""What a pattern's description says is what the reference computes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flux_megatron import doctor, ops, reference
from flux_megatron.doctor import strategies as page
from flux_megatron.overlap import registry
from flux_megatron.overlap.registry import forward
from flux_megatron.patterns import COLUMN, ROW, Pattern
from flux_megatron.problem import Problem

M, N, K, R = 24, 16, 40, 2


def problem(pattern: Pattern) -> Problem:
    return Problem(pattern, M, N, K, "float32", R)


@pytest.mark.parametrize("pattern", Pattern)
def test_operands_and_results_have_the_sizes_of_the_description(pattern):
    p = problem(pattern)
    x = [torch.ones(p.x_rows, p.K_local) for _ in range(R)]
    w = [torch.ones(p.N_local, p.K_local) for _ in range(R)]
    for y in reference.PATTERNS[pattern](x, w):
        assert y.shape == (p.M_shard if p.spec.scatters else M, p.N_local)
        assert torch.equal(y, torch.full_like(y, K)), "a sum over K, whole or over the ranks"


@pytest.mark.parametrize("pattern", Pattern)
def test_the_problem_is_found_from_one_rank_s_operands(pattern):
    p = problem(pattern)
    found = Problem.of_operands(pattern, p.x_rows, p.N_local, p.K_local, "float32", R, "nt", "cuda")
    assert found == p


@pytest.mark.parametrize("pattern", [pattern for pattern in Pattern if pattern.spec.dual])
def test_dgrad_is_the_dual(pattern):
    """dy has the rows of y and the weight of x: dx comes out as x lies."""
    p = problem(pattern)
    dual = p.dual
    assert (dual.layout, dual.dual) == ("nn", p)
    assert dual.x_rows == (p.M_shard if p.spec.scatters else M)
    assert (dual.K_local, dual.N_local) == (p.N_local, p.K_local)
    assert dual.columns_moved == p.columns_moved


def test_a_layer_s_forward_and_backward():
    assert (COLUMN.dual, ROW.dual) == (ROW, COLUMN)
    assert COLUMN.spec.gathers
    assert ROW.spec.scatters


@pytest.mark.parametrize("pattern", Pattern)
def test_every_pattern_has_an_operation_and_a_strategy_that_is_always_possible(pattern):
    assert ops.OPERATIONS[pattern].__doc__
    *_, last = registry.STRATEGIES[pattern].values()
    assert not last.NEEDS_SYMMETRIC_MEMORY
    odd = dataclasses.replace(problem(pattern), dtype="float64", device="cpu")
    assert last.supports(odd) is None


def test_a_strategy_without_symmetric_memory_does_not_ask_for_it():
    p = dataclasses.replace(problem(COLUMN), device="cpu")
    said = {name: registry.refusal(p, name, "no link") for name in registry.STRATEGIES[COLUMN]}
    assert said.pop("sequential") is said.pop("signalled") is None
    assert {*said.values()} == {"no link"}


def test_the_command_says_what_works_and_why_not(monkeypatch, capsys):
    found = {(line.operation, line.strategy): line for line in page.lines(4)}
    assert found["ag_gemm", "sequential"][2:4] == ("works", "works")
    one, other = found["ag_gemm", "pipelined"], found["gemm_ar", "pipelined"]
    assert (other.forward, other.backward) == (one.forward, "no communication")
    assert (one.forward, one.backward) == found["gemm_rs", "fused"][2:4]
    assert {found[str(p), "signalled"].forward for p in Pattern} == {found["gemm_rs", "fused"][2]}
    assert found["gemm_rs", "low_latency"][2:4] == found["gemm_rs", "fused"][2:4]
    assert found["a2a_gemm", "pipelined"].forward == page.ON_DEVICE
    assert found["embedding_a2a", "pipelined"].backward == page.NO_GEMM
    if not torch.cuda.is_available():
        assert "compute capability 9" in found["ag_gemm", "hopper"].forward
    assert "not built" not in {cell for line in found.values() for cell in line}
    assert doctor.main(["--strategies", "2"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("2 ranks")
    assert all(line.forward in shown for line in page.lines(2))
    built = dict(registry.STRATEGIES[ROW])
    built.pop("pipelined")
    monkeypatch.setattr(registry, "STRATEGIES", {**registry.STRATEGIES, ROW: built})
    found = {(line.operation, line.strategy): line for line in page.lines(4)}
    assert found["ag_gemm", "pipelined"].backward == page.NOT_BUILT
    assert found["gemm_rs", "pipelined"].forward == page.NOT_BUILT


class Pieces:
    """A strategy that says what was asked of it."""

    def ag_gemm(self, *given):
        return "gathered", *given

    def gemm_rs(self, *given):
        return "scattered", *given

    def gemm_ar(self, *given):
        return "reduced", *given


def test_a_whole_call_is_put_together_from_its_pieces():
    assert forward(Pieces(), COLUMN)(1, 2, "nt", 4, 5) == ("gathered", 1, 2, None, "nt", 4, 5, None)
    assert forward(Pieces(), ROW)(1, 2, "nt", 4, 5) == ("scattered", 1, 2, "nt", 4, 5)
    assert forward(Pieces(), Pattern.GEMM_AR)(1, 2, "nt", 4, 5) == ("reduced", 1, 2, "nt", 4, 5)

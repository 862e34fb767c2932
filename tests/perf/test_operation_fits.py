"""The costs of Embedding + All-to-All and of experts are those of the committed rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from flux_megatron.perf import expert_cost, operation_fits
from flux_megatron.perf.embedding_cost import FUSED, LAYOUT, LOOKUP, fused_us
from flux_megatron.perf.expert_cost import COSTS, Experts, operation_us, part_us
from flux_megatron.perf.least_squares import fit, left_out, total

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "docs/results/h200x2"


def test_costs_are_those_of_the_rows():
    embedding, experts = operation_fits.load(ROWS)
    found = operation_fits.expert_costs(experts)
    found |= operation_fits.embedding_costs(embedding, found["a2a"])
    held = COSTS | {"lookup": LOOKUP, "fused": FUSED, "layout": LAYOUT}
    assert found.keys() == held.keys()
    for name, costs in found.items():
        assert held[name] == pytest.approx(costs, rel=1e-4), name


def test_the_page_has_the_errors_of_the_rows():
    table = operation_fits.errors_table(ROWS)
    page = (ROOT / "docs/simulator.md").read_text()
    assert f"<!-- operations -->\n{table}\n<!-- end of operations -->" in page


def test_no_operation_is_further_off_than_the_page_says():
    embedding, experts = operation_fits.load(ROWS)
    a2a = operation_fits.expert_costs(experts)["a2a"]
    errors = operation_fits.embedding_errors(embedding, a2a)
    errors += operation_fits.expert_errors(experts)
    assert max(max(-one.low, one.high) for one in errors) < 0.17
    assert len(embedding) == 7
    assert len(experts) == 16


def test_a_row_that_changed_is_seen():
    embedding, experts = operation_fits.load(ROWS)
    a2a = operation_fits.expert_costs(experts)["a2a"]
    embedding[0].times_us["fused"] *= 1.05
    changed = operation_fits.embedding_costs(embedding, a2a)["fused"]
    assert changed != pytest.approx(FUSED, rel=1e-4)


def test_a_fit_finds_costs_again_and_refuses_what_it_cannot_tell_apart():
    costs = {"a": 3.0, "b": 0.25}
    terms = [{"a": float(n), "b": float(n * n)} for n in range(1, 6)]
    rows = [(one, total(costs, one)) for one in terms]
    assert fit(rows) == pytest.approx(costs)
    assert left_out(rows) == pytest.approx([0.0] * 5)
    assert fit([({"a": 1.0, "b": float(n)}, 10.0 - n) for n in range(5)])["b"] == 0
    with pytest.raises(ValueError, match="cannot tell"):
        fit([({"a": 1.0 * n, "b": 2.0 * n}, 1.0 * n) for n in range(1, 5)])
    with pytest.raises(ValueError, match=r"1 rows given.*\['a', 'b'\]"):
        fit([({"a": 1.0, "b": 2.0}, 1.0)])


def test_transfers_of_the_measured_lookups_are_hidden():
    """So their fused times are the kernel's alone, as `FUSED` takes them."""
    embedding, experts = operation_fits.load(ROWS)
    a2a = operation_fits.expert_costs(experts)["a2a"]
    for case in embedding:
        transfer = total(a2a, expert_cost.of("a2a", case.terms))
        assert fused_us(case.times_us["fused"], transfer, 8) < 1.07 * case.times_us["fused"]


def test_waits_of_the_host_are_as_the_page_says():
    _, experts = operation_fits.load(ROWS)
    waits = [case.times_us["nccl + sync"] - case.times_us["nccl"] for case in experts]
    said = f"{min(waits) / 1e3:.2f} to {max(waits) / 1e3:.2f} ms"
    assert said in (ROOT / "docs/simulator.md").read_text()


def test_fused_time_between_its_bounds():
    assert fused_us(100.0, 40.0, 10) == 104.0
    assert fused_us(40.0, 100.0, 10) == 104.0
    assert fused_us(40.0, 100.0, 1) == 140.0  # one slice: nothing overlaps


def test_experts_alone_and_together():
    one = Experts(ranks=2, experts=4, rows=8192, came=8192, N=14336, K=4096, moved=4096)
    parts = sum(part_us(part, one) for part in ("gemm", "a2a", "sort"))
    assert operation_us("a2a_gemm", "nccl", one) == pytest.approx(parts)
    assert operation_us("a2a_gemm", "nccl + sync", one) == pytest.approx(parts + 821.13)
    assert operation_us("a2a_gemm", "fused", one) < parts
    alone = one._replace(ranks=1)
    for strategy in ("fused", "nccl", "nccl + sync"):
        assert operation_us("a2a_gemm", strategy, alone) == part_us("gemm", alone)
    tiny = one._replace(N=16, K=16)  # nothing to hide the all-to-all behind
    assert operation_us("a2a_gemm", "fused", tiny) == part_us("a2a", tiny)

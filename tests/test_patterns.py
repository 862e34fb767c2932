"""What a pattern's description says is what the reference computes; problems distinguish local from
global sizes; plans survive their text.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flux_megatron import doctor, ops, settings
from flux_megatron.doctor import strategies as page
from flux_megatron.kernels.hopper.config import TILE
from flux_megatron.lab import reference
from flux_megatron.lab.perf.operator_cost import moved_bytes
from flux_megatron.overlap import hopper, registry
from flux_megatron.patterns import COLUMN, ROW
from flux_megatron.problem import FIELDS, TRANSPORTS, Pattern, Plan, Problem, Tile
from flux_megatron.symm.places import Missing
from flux_megatron.tuning.plan_table import racers

M, N, K, R = 24, 16, 40, 2


def problem(pattern: Pattern) -> Problem:
    return Problem(pattern, M, N, K, "float32", R)


@pytest.mark.parametrize("pattern", Pattern)
def test_a_pattern_is_what_its_description_says(pattern):
    """Sizes; an operation; and a strategy that is always possible."""
    p = problem(pattern)
    x = [torch.ones(p.x_rows, p.K_local) for _ in range(R)]
    w = [torch.ones(p.N_local, p.K_local) for _ in range(R)]
    for y in reference.PATTERNS[pattern](x, w):
        assert y.shape == (p.M_shard if p.spec.scatters else M, p.N_local)
        assert torch.equal(y, torch.full_like(y, K)), "a sum over K, whole or over the ranks"
    found = Problem.of_operands(pattern, p.x_rows, p.N_local, p.K_local, "float32", R, "nt", "cuda")
    assert found == p
    assert ops.OPERATIONS[pattern].__doc__
    *_, last = registry.STRATEGIES[pattern].values()
    assert not last.NEEDS_SYMMETRIC_MEMORY
    assert last.supports(replace(p, dtype="float64", device="cpu")) is None


@pytest.mark.parametrize("pattern", [pattern for pattern in Pattern if pattern.spec.dual])
def test_dgrad_is_the_dual(pattern):
    """dy has the rows of y and the weight of x: dx comes out as x lies."""
    p = problem(pattern)
    dual = p.dual
    assert (dual.layout, dual.dual) == ("nn", p)
    assert dual.x_rows == (p.M_shard if p.spec.scatters else M)
    assert (dual.K_local, dual.N_local) == (p.N_local, p.K_local)
    assert moved_bytes(dual) == moved_bytes(p)


def test_every_strategy_has_its_name_in_the_settings_and_its_numbers_in_plans():
    names = {name for table in registry.STRATEGIES.values() for name in table}
    assert {*settings.STRATEGIES} == {"auto", *names}
    assert {*FIELDS} == names


def test_a_strategy_without_symmetric_memory_does_not_ask_for_it():
    p = replace(problem(COLUMN), device="cpu")
    none = Missing("no link")
    said = {name: registry.refusal(p, name, none) for name in registry.STRATEGIES[COLUMN]}
    assert said.pop("sequential") is said.pop("signalled") is None
    assert {*said.values()} == {"no link"}


def test_mailboxes_will_do_where_copy_engines_alone_reach_other_ranks(monkeypatch):
    monkeypatch.setattr(hopper, "supports", lambda problem: None)
    boxes = Missing("no link", mailboxes=True)

    def able(pattern: Pattern) -> set[str]:
        p = replace(problem(pattern), device="cpu")
        names = registry.STRATEGIES[pattern]
        return {name for name in names if not registry.refusal(p, name, boxes, Plan(name))}

    others = {"pipelined", "signalled", "sequential"}
    assert able(COLUMN) == {"hopper", "fused"} | others
    assert able(ROW) == {"hopper"} | others
    by_sms = Plan("hopper", transport="sm")
    monkeypatch.setattr(hopper, "default_plan", lambda problem: by_sms)
    assert registry.refusal(problem(ROW), "hopper", boxes) is None, "it has others"
    assert registry.default_plan(problem(ROW), "hopper", boxes).transport == "copy_engine"
    assert registry.default_plan(problem(ROW), "hopper", None) is by_sms
    assert registry.refusal(problem(ROW), "hopper", boxes, by_sms) == "no link"
    summed = replace(problem(Pattern.GEMM_AR), M=4096, N=5120, K=8192, world_size=2)
    assert registry.default_plan(summed, "hopper", boxes).transport == "engines"
    for one in (replace(summed, layout="nn"), replace(summed, world_size=4)):
        assert registry.default_plan(one, "hopper", boxes).transport == "copy_engine"
    assert any(one.transport == "engines" for one in racers(summed, ["hopper"], boxes))
    assert all(one.transport != "engines" for one in racers(summed, ["hopper"]))
    of_one_tile = replace(summed, M=256, N=256)
    assert registry.why_not(of_one_tile, Plan("hopper", tile=TILE, transport="engines"))
    odd = replace(problem(Pattern.GEMM_AR), M=M + 1)
    assert registry.refusal(odd, "hopper", boxes, Plan("hopper")) == "no link"


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
    monkeypatch.delitem(registry.STRATEGIES[ROW], "pipelined")
    found = {(line.operation, line.strategy): line for line in page.lines(4)}
    assert found["ag_gemm", "pipelined"].backward == page.NOT_BUILT
    assert found["gemm_rs", "pipelined"].forward == page.NOT_BUILT


SIZES = st.sampled_from([16, 32, 64, 128, 256])
TILES = st.builds(
    Tile, block_m=SIZES, block_n=SIZES, block_k=SIZES, group_m=st.integers(1, 16),
    num_warps=st.sampled_from([4, 8]), num_stages=st.integers(1, 5), tma=st.booleans(),
)  # fmt: skip
NUMBERS = {
    "comm_rows": st.integers(0, 10**6), "tile": TILES, "gemms": st.integers(0, 8),
    "k_parts": st.integers(0, 8), "bands": st.integers(0, 8), "two_phase": st.booleans(),
    "transport": st.sampled_from(TRANSPORTS), "comm_sms": st.integers(0, 64),
    "group_rows": st.lists(st.integers(1, 512), max_size=15).map(tuple),
}  # fmt: skip
PLANS = st.one_of(
    st.builds(Plan, strategy=st.just(strategy), **{name: NUMBERS[name] for name in own})
    for strategy, own in FIELDS.items()
)


@given(PLANS, PLANS)
def test_a_plan_survives_its_text_and_different_plans_have_different_texts(one, other):
    assert Plan.loads(one.dumps()) == one
    assert (one == other) == (one.dumps() == other.dumps())


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"comm_rows": 0}', '{"strategy": "fused", "chunks": 4}',
     '{"strategy": "fused", "comm_rows": 0, "tile": {"block": 1}}'],
)  # fmt: skip
def test_other_texts_are_no_plans(text):
    with pytest.raises((ValueError, KeyError, TypeError)):
        Plan.loads(text)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"transport": "nvlink"}, "'nvlink' given, one of"),
        ({"comm_rows": -1}, r"bands \(-1, 0, 0, 0\) given"),
        ({"k_parts": -2}, r"k_parts, bands \(0, 0, -2, 0\) given"),
        ({"strategy": "signalled", "comm_sms": -1}, "comm_sms -1"),
        ({"strategy": "signalled", "group_rows": (16, 0)}, r"group_rows \(16, 0\)"),
        ({"strategy": "signalled", "group_rows": (1,) * 16}, "at most 15 sizes"),
        ({"gemms": 2}, "gemms 2 given for hopper, which has comm_rows, tile, k_parts, transport"),
        ({"strategy": "sequential", "comm_rows": 1}, "sequential, which has no numbers"),
    ],
)
def test_a_wrong_plan_says_what_is_wrong(fields, message):
    with pytest.raises(ValueError, match=message):
        Plan(**{"strategy": "hopper", **fields})


def test_what_a_text_leaves_out_is_a_default():
    """Plans that were written before a field was added stay what they were."""
    assert Plan.loads('{"strategy": "fused"}') == Plan("fused")
    text = '{"strategy": "fused", "comm_rows": 8, "tile": {"block_n": 256}}'
    assert Plan.loads(text) == Plan("fused", 8, Tile(block_n=256))


def test_a_problem_says_all_that_it_is():
    problem = Problem(Pattern.GEMM_RS, 24, 40, 16, "float16", 4, layout="nn", device="cpu")
    assert str(problem) == "gemm_rs M=24 N=40 K=16 nn float16 over 4 ranks on cpu"
    assert str(replace(problem, beside=True)) == f"{problem}, beside others"
    assert str(Pattern.AG_GEMM) == Pattern.AG_GEMM == "ag_gemm"

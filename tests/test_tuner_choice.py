"""Which plan a call gets: a measured one, or a race's winner, by ranges of M; and which plans of
`hopper` the tuner tries.
"""

import contextlib
import errno
import io
import os
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import Case, check, plan_of
from races import FakeRace
from ranks import DEVICE, on_device, on_device_ranks

from flux_megatron import errors, ops, settings
from flux_megatron.kernels.hopper.config import NARROW
from flux_megatron.kernels.sizes import cdiv
from flux_megatron.overlap import hopper, low_latency_plans, registry
from flux_megatron.overlap.report import report
from flux_megatron.problem import Pattern, Plan, Problem, Tile
from flux_megatron.symm import workspaces
from flux_megatron.symm.agreement import Agreement
from flux_megatron.symm.places import Missing
from flux_megatron.tuning import choice, environment, plan_cache, plan_table, tuner
from flux_megatron.tuning.plan_entry import Entry, Measured
from flux_megatron.tuning.plan_table import RANGES, PlanTable, for_rows, raced_as, range_of
from flux_megatron.tuning.trial import Trial

RULED = "fused" if DEVICE == "cpu" else "sequential"  # of few rows, unmeasured
SMALL, LARGER = Case("ag_gemm", 6, 5, 4), Case("ag_gemm", 64, 5, 4)
PLAIN = Plan("sequential")
CACHE = {"FLUX_MEGATRON_CACHE": "{tmp_path}"}
ON = CACHE | {"FLUX_MEGATRON_TUNE": "on"}


def store(folder: Path, M: int, strategy: str, beside: bool = False, **changes: str) -> None:
    """An entry for `SMALL`'s layer over two ranks, as if it had been measured here."""
    device = torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device("cpu")
    where = environment.of(device)
    problem = Problem(Pattern.AG_GEMM, M, 10, 4, "float32", 2, device=DEVICE, beside=beside)
    plan = plan_of(strategy, comm_rows=3)
    measured = (Measured(plan, 0.0),)
    entry = Entry(problem, replace(where, **changes), plan, measured, (), 0, 0.0, 12, "today")
    plan_cache.store(plan_cache.user_folder(folder), entry)


OTHER, BESIDE = {"driver": "1.2.3"}, {"beside": True}
# FLUX_MEGATRON_BESIDE, entries of the cache, and what runs. One range of M is that of 64 and all
# below, the next that of 128.
STORED = {
    "hit": ("auto", [(12, "pipelined", {})], "pipelined"),
    "sequential": ("auto", [(12, "sequential", {})], "sequential"),
    "hit and neighbour": ("auto", [(12, "pipelined", {}), (18, "sequential", {})], "pipelined"),
    "its range": ("auto", [(18, "pipelined", {})], "pipelined"),
    "nearest": ("auto", [(6, "pipelined", {}), (14, "sequential", {})], "sequential"),
    "same software": ("auto", [(12, "pipelined", OTHER), (12, "sequential", {})], "sequential"),
    "other software": ("auto", [(12, "pipelined", OTHER)], "pipelined"),
    "other connections": ("auto", [(12, "pipelined", {"max_connections": "8"})], "pipelined"),
    "another range": ("auto", [(128, "pipelined", {})], RULED),
    "unknown strategy": ("auto", [(12, "magic", {})], RULED),
    "nothing": ("auto", [], RULED),
    "beside others": ("1", [(12, "pipelined", BESIDE), (12, "sequential", {})], "pipelined"),
    "beside alone": ("auto", [(12, "pipelined", BESIDE)], RULED),
    "never beside": ("0", [(12, "pipelined", BESIDE)], RULED),
}


@pytest.mark.parametrize(("beside", "entries", "expected"), STORED.values(), ids=STORED)
@on_device_ranks(2, environment=CACHE | {"FLUX_MEGATRON_BESIDE": "{beside}"})
def test_off(rank, tmp_path, entries, expected):
    if rank == 0:
        for M, strategy, changes in entries:
            store(tmp_path, M, strategy, **changes)
    dist.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what cannot be read
        check(SMALL)
    assert report().calls == {("ag_gemm", expected): 1}


@on_device_ranks(2)
def test_only_the_leaders_cache_counts(rank, tmp_path):
    """Other ranks may not even see its files."""
    os.environ["FLUX_MEGATRON_CACHE"] = str(tmp_path / str(rank))
    settings.reload()
    store(tmp_path / str(rank), 12, ("pipelined", "sequential")[rank])
    check(SMALL)
    assert report().calls == {("ag_gemm", "pipelined"): 1}


def raced(rank: int, favourite: str) -> tuple[dict, int, str]:
    tuner.race = FakeRace(lambda name: 1.0 if name == favourite else 100.0)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        for case in (SMALL, SMALL, replace(SMALL, seed=1), SMALL):
            check(case)
    return report().calls, len(tuner.race.turns), said.getvalue()


def test_a_range_is_raced_once_said_and_kept(tmp_path):
    """And under the conditions of the run."""
    on = {name: value.format(tmp_path=tmp_path) for name, value in ON.items()}
    on["FLUX_MEGATRON_BESIDE"] = "1"
    first = on_device(raced, 2, "pipelined", environment=on)
    for rank, (calls, races, said) in enumerate(first):
        assert calls == {("ag_gemm", "pipelined"): 4}
        assert races > 1
        line = "flux_megatron: measured ag_gemm M=12 N=10 K=4 nt float32 over 2 ranks on"
        assert said.count(line) == (rank == 0)
        assert rank or "pipelined 1 us, sequential 100 us" in said
    (file,) = tmp_path.rglob("*.json")
    assert '"beside": true' in file.read_text()
    # a later run finds it, whatever it would measure itself
    for mode in ("on", "off"):
        later = on | {"FLUX_MEGATRON_TUNE": mode}
        found = on_device(raced, 2, "fused", environment=later)
        assert found == [({("ag_gemm", "pipelined"): 4}, 0, "")] * 2
    # what was measured with other software is measured again
    file.write_text(file.read_text().replace('"torch": "', '"torch": "0.'))
    for calls, races, _ in on_device(raced, 2, "fused", environment=on):
        assert calls == {("ag_gemm", "fused"): 4}
        assert races > 1
    assert '"torch": "0.' not in file.read_text()


@pytest.mark.parametrize(("takes_s", "raced_ranges"), [(0.3, 2), (0.5, 1)])
@on_device_ranks(2, environment=ON | {"FLUX_MEGATRON_TUNE_SECONDS": "0.4"})
def test_no_range_is_raced_when_the_time_for_races_is_over(rank, tmp_path, takes_s, raced_ranges):
    """Every plan's first run, which compiles, takes as long again, and does not count."""
    fake = FakeRace(lambda name: 1.0 if name == "pipelined" else 100.0, takes_s=takes_s)
    tuner.race = choice.time = fake
    for case in (SMALL, LARGER):
        check(case)
    assert len(tuner.race.turns) > 2
    expected = {("ag_gemm", "pipelined"): raced_ranges, ("ag_gemm", RULED): 2 - raced_ranges}
    assert report().calls == {call: count for call, count in expected.items() if count}
    dist.barrier()
    assert len([*tmp_path.rglob("*.json")]) == raced_ranges


@pytest.mark.parametrize(("race_s", "raced"), [(0.3, [3000, 1024, 2048, 8192]), (0.4, [3000])])
def test_where_races_are_long_a_kind_has_that_of_its_own_m(monkeypatch, race_s, raced):
    measured = []

    def takes(problem: Problem, plans: list[Plan], space: SimpleNamespace) -> None:
        measured.append(problem.M)
        choice._spent_s += race_s

    monkeypatch.setattr(choice, "_spent_s", 0.0)
    monkeypatch.setattr(choice, "_measured", takes)
    monkeypatch.setattr(tuner, "leaders", lambda group, value: value)
    monkeypatch.setattr(registry, "runnable", lambda *given: iter(["pipelined"]))
    monkeypatch.setattr(choice, "racers", lambda *given: [PLAIN])
    asked = SimpleNamespace(ask=lambda question, answer: [answer])
    space = SimpleNamespace(agreement=asked, group=None, device=torch.device("cpu"), missing=None)
    problem, table = replace(LAYER, M=3000, device="cpu"), PlanTable()
    choice._race(problem, table.unsettled(problem), table, space)
    assert measured == raced
    assert table.unsettled(replace(problem, M=8192)) == [], "no later call waits for a race"


@on_device_ranks(2, environment=CACHE)
def test_other_settings_ask_anew_and_by_itself_no_cpu_races(rank, tmp_path):
    tuner.race = FakeRace(lambda name: 1.0)
    races = []
    for tune in ("off", "auto", "on"):
        os.environ["FLUX_MEGATRON_TUNE"] = tune
        settings.reload()
        check(SMALL)
        races.append(bool(tuner.race.turns))
    assert races == [False, DEVICE == "cuda", True]


@on_device_ranks(2, environment=ON)
def test_a_new_m_asks_nobody(rank):
    questions: list[str] = []
    ask = Agreement.ask
    tuner.race = FakeRace(lambda name: 1.0 if name == "pipelined" else 100.0)
    with mock.patch.object(
        Agreement, "ask", lambda self, *given: (questions.append(given[0]), ask(self, *given))[1]
    ):
        for rows in range(23, 46):  # M of one range
            check(replace(SMALL, M_shard=rows))
    asked = [text for text in questions if "grows" not in text]
    compiled = [] if DEVICE == "cpu" else ["kernels"]
    assert [text.partition(" ")[0] for text in asked] == ["ag_gemm", *compiled, "race"]
    assert len(report().calls) == 1


@on_device_ranks(2, environment=ON)
def test_nothing_is_measured_while_a_rank_captures(rank):
    tuner.race = FakeRace(lambda name: 1.0)
    choice.capturing = lambda device: rank == 1
    check(SMALL)
    assert (report().calls, len(tuner.race.turns)) == ({("ag_gemm", RULED): 1}, 0)


@on_device_ranks(2, environment=ON | {"FLUX_MEGATRON_TIMEOUT_S": "5"})
def test_ranks_that_disagree_are_reported_before_a_race(rank):
    """One brings another shape, then a plan where the other has none; then all is well."""
    group = dist.group.WORLD
    x, w = torch.ones(6, 4 + rank, device=DEVICE), torch.ones(5, 4 + rank, device=DEVICE)
    with pytest.raises(errors.ProblemMismatch, match="rank 1: ag_gemm M=12 N=10 K=5"):
        ops.all_gather_gemm(x, w, group)
    x, w = torch.ones(6, 4, device=DEVICE), torch.ones(5, 4, device=DEVICE)
    with pytest.raises(errors.ProblemMismatch, match=r"rank 1: ag_gemm M=12 N=10 K=4 .* with {"):
        ops.all_gather_gemm(x, w, group, plan=PLAIN if rank else None)
    check(LARGER)


@on_device_ranks(2, environment=ON)
def test_a_cache_that_cannot_be_written_costs_a_warning(rank, tmp_path):
    (tmp_path / "plans").touch()  # not a folder
    dist.barrier()
    tuner.race = FakeRace(lambda name: 1.0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        check(SMALL)
    said = [str(one.message) for one in said if "flux_megatron" in str(one.message)]
    assert len(said) == (rank == 0)
    assert all("a measured plan is not kept:" in text for text in said)


@on_device_ranks(2, environment=CACHE)
def test_a_cache_that_cannot_be_read_costs_a_warning(rank):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with mock.patch("os.listdir", side_effect=OSError(errno.ESTALE, "Stale file handle")):
            check(SMALL)
    said = [str(one.message) for one in said if "measured plans are left out" in str(one.message)]
    assert len(said) == 2 * (rank == 0), "the user's folder, and the one we ship"
    assert all("[Errno 116] Stale file handle" in text for text in said)
    assert report().calls == {("ag_gemm", RULED): 1}


@on_device_ranks(2, environment=ON)
def test_a_race_without_memory_is_said_once_and_the_rule_chooses(rank, tmp_path):
    """No M of the range tries it again."""
    refuse = mock.Mock(side_effect=errors.WorkspaceError("no symmetric memory"))
    said = io.StringIO()
    with mock.patch.object(Trial, "reserve", refuse), contextlib.redirect_stderr(said):
        for rows in (6, 6, 7, 9):
            check(replace(SMALL, M_shard=rows))
    assert refuse.call_count == 1
    reason = "the rule chooses its plan: WorkspaceError: no symmetric memory\n"
    lines = [one for one in said.getvalue().splitlines(True) if "compiled kernels" not in one]
    assert [one.endswith(reason) for one in lines] == [True] * (rank == 0)
    assert report().calls == {("ag_gemm", RULED): 4}
    assert not [*tmp_path.rglob("*.json")]


@on_device_ranks(2, environment=ON)
def test_fp8_is_raced_and_right(rank):
    x, w = (torch.ones(16, 32, device=DEVICE).to(torch.float8_e4m3fn) for _ in range(2))
    given = {"x_scale": torch.ones(1, device=DEVICE), "w_scale": torch.ones(1, device=DEVICE)}
    with mock.patch.object(tuner, "measure", wraps=tuner.measure) as measure:
        y = ops.gemm_reduce_scatter(x, w, dist.group.WORLD, **given, out_dtype=torch.bfloat16)
    assert torch.equal(y, torch.full_like(y, 64))
    assert measure.call_count == 1


@on_device_ranks(2, environment=ON)
def test_measuring_leaves_the_run_alone(rank):
    torch.manual_seed(5)
    before = torch.rand(1, device=DEVICE)
    torch.manual_seed(5)
    check(SMALL)  # operands of a generator of their own
    held = report().workspace_bytes
    for seed in range(3):
        check(replace(SMALL, seed=seed))
    assert torch.equal(before, torch.rand(1, device=DEVICE))
    assert report().workspace_bytes == held


LAYER = Problem(Pattern.GEMM_RS, 4096, 5120, 25600, "bfloat16", 2)
NAMES = ["hopper", "fused", "pipelined", "signalled"]
HALVES = Plan("pipelined", comm_rows=1024)  # of a shard of 2048 rows


@pytest.mark.parametrize(
    ("changes", "raced"), [({}, True), ({"blockwise": True}, False), ({"wire": True}, False)]
)
def test_fp8_with_one_scale_a_tensor_is_raced(changes, raced):
    fp8 = {"dtype": "float8_e4m3fn", "out_dtype": "bfloat16", **changes}
    assert choice._is_raced(replace(LAYER, **fp8)) == raced


def test_ranges_are_powers_of_two_and_every_m_has_one():
    assert [range_of(M) for M in (1, 12, 64, 90, 91, 1448, 1449, 8192, 10**6)] == [
        3, 4, 6, 6, 7, 10, 11, 13, 13
    ]  # fmt: skip
    assert {range_of(1 << number) for number in RANGES} == {*RANGES}


@pytest.mark.parametrize(
    ("M", "number", "raced"), [(64, 7, 129), (2304, 11, 2304), (2305, 11, 2307), (99999, 13, 8193)]
)
def test_a_call_races_its_own_range_at_its_own_m(M, number, raced):
    assert raced == raced_as(replace(LAYER, M=M, world_size=3), number).M, "whole shards"


def test_the_nearest_point_of_the_range_gives_the_plan():
    table = PlanTable({2048: PLAIN, 3072: HALVES, 4096: Plan("fused")})
    found = [table.plan(replace(LAYER, M=M), NAMES) for M in (2048, 2100, 3100, 5700)]
    assert [plan.strategy for plan in found] == [*["sequential"] * 2, "pipelined", "fused"]
    assert found[-1] == Plan("fused")
    far = PlanTable({4096: PLAIN})
    assert far.plan(replace(LAYER, M=16384), ["pipelined"]) == Plan("pipelined"), "by the rule"
    table = PlanTable({4096: Plan("hopper")})  # which cannot run this M
    assert table.plan(replace(LAYER, M=4097), ["pipelined"]) == Plan("pipelined")
    assert table.plan(replace(LAYER, M=4097), []) == PLAIN
    table = PlanTable({1500: PLAIN, 2800: HALVES})  # by the ratio of rows
    assert table.plan(replace(LAYER, M=2100), NAMES).strategy == "pipelined"


def test_where_nothing_can_overlap_a_measured_sequential_is_no_reason(monkeypatch):
    space = SimpleNamespace(missing=Missing("no memory is shared"))
    monkeypatch.setattr(registry, "refusal", lambda *given: given[2].reason)
    assert choice.choose(LAYER, PlanTable({4096: PLAIN}), space) == (PLAIN, space.missing.reason)


def test_a_plan_keeps_its_share_of_rows():
    assert for_rows(HALVES, 4096, LAYER) == HALVES
    assert for_rows(HALVES, 4096, replace(LAYER, M=6000)).comm_rows == 1500
    assert for_rows(PLAIN, 4096, replace(LAYER, M=6000)) == PLAIN
    assert for_rows(HALVES, 1, replace(LAYER, M=6000)).comm_rows == 3000  # fewer than ranks
    bands = Plan("signalled", tile=Tile(64, 64, 32), group_rows=(256, 512))
    on_cpu = replace(LAYER, M=6016, device="cpu")
    assert LAYER.world_size == 2, "1280 rows are in the last band of 2048"
    assert for_rows(bands, 4096, on_cpu).group_rows == (384, 768)
    assert for_rows(bands, 4096, replace(on_cpu, M=2)).group_rows == ()
    assert for_rows(bands, 6016, on_cpu) == bands


def test_a_plan_of_rows_that_its_strategy_cannot_run_is_refused(monkeypatch):
    monkeypatch.setattr(low_latency_plans, "_on_hopper", lambda: True)
    raced = Problem(Pattern.GEMM_AR, 128, 8192, 8192, "bfloat16", 2)
    plan, problem = low_latency_plans.default_plan(raced), replace(raced, M=4096)
    assert registry.refusal(problem, "low_latency", None, for_rows(plan, 128, problem))


def unsettled(table: PlanTable, M: int, pattern: Pattern = Pattern.GEMM_RS) -> list[int]:
    return table.unsettled(replace(LAYER, pattern=pattern, M=M))


def test_the_first_range_of_training_races_all_of_them():
    table = PlanTable()
    assert unsettled(table, 300) == [8]
    table.settled |= {8}
    assert unsettled(table, 6000) == [13, 10, 11, 12], "its own first"
    table.points[8192] = PLAIN
    assert unsettled(table, 5000) == [12, 10, 11]
    assert unsettled(table, 7000) == []
    table.settled |= {10, 11, 12}
    assert all(unsettled(table, M) == [] for M in range(800, 20000, 100))
    assert unsettled(PlanTable({64: PLAIN}), 4096) == [12, 10, 11, 13], "whatever came before"


def test_ranges_are_raced_as_they_are_met_where_that_is_wanted():
    table = PlanTable(apart=True)
    assert unsettled(table, 6000) == [13]
    table.settled |= {13}
    assert unsettled(table, 3000) == [12]
    assert [*table.ranges(4096)] == [12], "nothing else is compiled"


@on_device_ranks(2, environment=CACHE)
def test_which_ranges_are_raced_is_the_leaders_choice(rank):
    os.environ["FLUX_MEGATRON_TUNE"] = "auto" if rank else "met"
    settings.reload()
    check(SMALL)
    agreed = workspaces.workspace(dist.group.WORLD, torch.device(DEVICE)).agreed.values()
    assert [one.apart for one in agreed if isinstance(one, PlanTable)] == [True]


def test_training_waits_for_no_race_of_few_rows():
    for table in (PlanTable({4096: PLAIN}), PlanTable(settled={10})):
        for pattern in (Pattern.AG_GEMM, Pattern.GEMM_RS):
            assert unsettled(table, 724, pattern) == unsettled(table, 64, pattern) == []
        assert unsettled(table, 64, Pattern.GEMM_AR) == [6], "decoding, its own range alone"
    assert unsettled(PlanTable({512: PLAIN}, {8}), 64) == [6], "no range of training was there"


@pytest.mark.parametrize(
    ("M", "names", "strategy"),
    [
        (8192, NAMES, "hopper"), (1024, NAMES[1:], "fused"), (1023, NAMES, "sequential"),
        (64, ["low_latency", *NAMES], "low_latency"), (65, ["low_latency", *NAMES], "sequential"),
    ],
)  # fmt: skip
def test_the_rule_without_a_measurement(monkeypatch, M, names, strategy):
    monkeypatch.setattr(registry, "default_plan", lambda problem, name, missing: Plan(name))
    sums = replace(LAYER, pattern=Pattern.GEMM_AR, M=M)
    assert plan_table.ruled(sums, names).strategy == strategy
    for pattern in (Pattern.AG_GEMM, Pattern.GEMM_RS):
        divided = replace(LAYER, pattern=pattern, M=64)
        assert plan_table.ruled(divided, ["low_latency", *NAMES]) == PLAIN


def test_a_measured_plan_that_mailboxes_do_not_allow(monkeypatch):
    boxes, pushed = Missing("no link", mailboxes=True), Plan("hopper", transport="sm")
    monkeypatch.setattr(hopper, "supports", lambda problem: None)
    monkeypatch.setattr(registry, "default_plan", lambda problem, name, missing: Plan(name))
    scattered = replace(LAYER, pattern=Pattern.GEMM_RS, M=4096)
    table = PlanTable({4096: pushed})
    assert table.plan(scattered, ["hopper"]) == pushed
    assert table.plan(scattered, ["hopper"], boxes) == Plan("hopper")


def test_the_rule_has_a_gemm_a_shard_for_blockwise_scales():
    blocks = replace(LAYER, dtype="float8_e4m3fn", out_dtype="bfloat16", blockwise=True)
    for M, plan in ((2048, Plan("pipelined")), (2047, PLAIN)):
        assert plan_table.ruled(replace(blocks, M=M), ["pipelined"]) == plan


def test_a_race_leaves_out_what_never_wins(monkeypatch):
    tried = {name: [plan_of(name, comm_rows=rows) for rows in range(6)] for name in NAMES}
    monkeypatch.setattr(registry, "candidates", lambda problem, name, missing: tried[name])
    assert plan_table.racers(LAYER, NAMES) == [PLAIN, *tried["hopper"][:4], *tried["pipelined"][:4]]
    few = plan_table.racers(replace(LAYER, M=512), ["pipelined", "signalled"])
    assert few == [PLAIN, *tried["pipelined"][:4]]
    assert plan_table.racers(LAYER, ["signalled"]) == [PLAIN, *tried["signalled"][:4]]
    boxes = plan_table.racers(LAYER, ["pipelined", "signalled"], Missing("no link", mailboxes=True))
    assert boxes == [PLAIN, *tried["pipelined"][:4], *tried["signalled"][:4]]
    boxes = plan_table.racers(LAYER, NAMES, Missing("no link", mailboxes=True))
    assert boxes == [PLAIN, *tried["hopper"][:4], *tried["signalled"][:4]]
    assert Plan("fused") in plan_table.racers(LAYER, NAMES[1:])


def test_rows_in_parts_of_k_are_tried_where_few_rows_have_long_k():
    def tried(M: int, K: int) -> set[tuple[int, int]]:
        problem = Problem(Pattern.AG_GEMM, M, 2 * 5120, K, "bfloat16", 2)
        plans = [plan for plan in hopper.candidates(problem) if plan.k_parts]
        assert {plan.k_parts for plan in plans} <= {4}
        return {(plan.tile.block_m, plan.tile.block_n) for plan in plans}

    assert tried(256, 2048) == tried(1024, 8192) == {(128, 256), (128, 128)}
    assert tried(112, 2048) == {(64, 128), (64, 64)}
    assert tried(256, 2047) == tried(112, 1024) == tried(2048, 8192) == set()


BY_SM = ("sm", 8)
AT_ONCE, IN_HALVES, QUARTERS, EIGHTHS = (("copy_engine", count) for count in (1, 2, 4, 8))


@pytest.mark.parametrize(
    ("M", "K", "kind", "pushes"),
    [
        (1024, 8192, "bfloat16", [BY_SM, IN_HALVES]),
        (1026, 8192, "bfloat16", [IN_HALVES, BY_SM]),
        (2046, 2048, "bfloat16", [BY_SM, IN_HALVES]),  # the link is late
        (2048, 8192, "bfloat16", [QUARTERS, BY_SM]),
        (2048, 2048, "bfloat16", [BY_SM, QUARTERS]),
        (2050, 2048, "bfloat16", [QUARTERS, BY_SM]),
        (2048, 2048, "bfloat16, 4 ranks", [BY_SM, QUARTERS]),
        (2304, 8192, "bfloat16", [QUARTERS]),
        (8192, 2048, "bfloat16", [QUARTERS, BY_SM]),
        (8192, 2056, "bfloat16", [QUARTERS]),
        (8194, 8192, "bfloat16", [EIGHTHS]),
        (8192, 1024, "bfloat16, 4 ranks", [IN_HALVES, BY_SM, QUARTERS]),
        (8194, 2056, "bfloat16, 4 ranks", [IN_HALVES, EIGHTHS]),
        (512, 4096, "fast", [BY_SM, AT_ONCE, IN_HALVES]),
        (514, 4096, "fast", [AT_ONCE, BY_SM, IN_HALVES]),
        (514, 4096, "split", [IN_HALVES, BY_SM, AT_ONCE]),
        (514, 4096, "split, 4 ranks", [AT_ONCE, BY_SM, IN_HALVES]),
        (2048, 4096, "fast", [QUARTERS, BY_SM, AT_ONCE, IN_HALVES]),
        (2048, 4096, "fast, 4 ranks", [IN_HALVES, BY_SM, AT_ONCE, QUARTERS]),
    ],
)
def test_who_pushes_a_shard_in_how_many_parts(M, K, kind, pushes):
    """Of M / 2 rows of 8192; what is first is chosen unmeasured."""
    kind, _, ranks = kind.partition(", ")
    R = 4 if ranks else 2
    problem = Problem(Pattern.GEMM_RS, R * M // 2, 8192, R * K, "bfloat16", R)
    if kind != "bfloat16":
        types = {"out_dtype": "bfloat16", "split_accumulator": kind == "split"}
        problem = replace(problem, dtype="float8_e4m3fn", **types)
    plans = [hopper.default_plan(problem), *hopper.candidates(problem)]
    tried = ((plan.transport, cdiv(problem.M_shard, plan.comm_rows)) for plan in plans)
    assert [*dict.fromkeys(tried)] == pushes


@pytest.mark.parametrize(
    ("pattern", "M", "N", "K", "narrow"),
    [
        (Pattern.GEMM_AR, 1152, 4096, 6144, True),
        (Pattern.GEMM_RS, 1152, 4096, 6144, True),
        (Pattern.GEMM_RS, 4096, 12288, 6144, False),  # its waves are 2 % shorter
        (Pattern.GEMM_RS, 2048, 8192, 8192, False),
    ],
)
def test_tiles_of_results_are_narrow_where_that_shortens_the_waves(pattern, M, N, K, narrow):
    problem = Problem(pattern, M, N, 2 * K, "bfloat16", 2)
    first, *others = dict.fromkeys(plan.tile for plan in hopper.candidates(problem))
    assert (first == NARROW) == narrow
    assert [one.block_n for one in others] == ([256, 256] if narrow else [128, 256])
    fp8 = replace(problem, dtype="float8_e4m3fn", out_dtype="bfloat16")
    assert hopper.default_plan(fp8).tile.block_n == 256


@pytest.mark.parametrize(
    ("M", "K", "R", "rows"),
    [(6144, 4096, 4, 8), (6144, 4096, 2, 16), (8192, 4096, 4, 16), (4096, 2048, 4, 16)],
)
def test_copy_engines_push_groups_of_tiles_of_one_rank(M, K, R, rows):
    problem = Problem(Pattern.GEMM_RS, M, 4096, R * K, "bfloat16", R)
    assert hopper.default_plan(problem).tile.group_m == rows


@pytest.mark.parametrize(
    ("pattern", "M", "R", "exchanged"),
    [
        (Pattern.GEMM_AR, 1152, 2, True), (Pattern.GEMM_AR, 1153, 2, False),
        (Pattern.GEMM_AR, 1152, 4, False), (Pattern.GEMM_RS, 1152, 2, False),
    ],
)  # fmt: skip
def test_two_ranks_exchange_few_results(pattern, M, R, exchanged):
    problem = Problem(pattern, M, 8192, 4096 * R, "bfloat16", R)
    plan = hopper.default_plan(problem)
    assert (plan.transport == "exchange") == exchanged
    assert sum(one.transport == "exchange" for one in hopper.candidates(problem)) == exchanged
    if exchanged:
        assert hopper.why_not(problem, plan) is None
        assert "none of gemm_rs" in hopper.why_not(replace(problem, pattern=Pattern.GEMM_RS), plan)
        assert "none with e4m3" in hopper.why_not(replace(problem, wire=True), plan)


def test_long_sums_with_a_split_accumulator_have_square_groups_of_tiles():
    def group(K: int, split: bool = True, R: int = 2) -> int:
        types = {"out_dtype": "bfloat16", "split_accumulator": split}
        problem = Problem(Pattern.AG_GEMM, 4096, 8192, K, "float8_e4m3fn", R, **types)
        return hopper.default_plan(problem).tile.group_m

    assert (group(8192), group(8176), group(8192, False), group(8192, R=4)) == (12, 16, 16, 16)

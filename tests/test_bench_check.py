"""`bench check`: its verdict on rows written by hand."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace

import pytest
from bench_rows import H200, row_of, rows_of
from typer.testing import CliRunner

from flux_megatron.bench import records, suites, targets
from flux_megatron.bench.check import MET, MISSED, MISSING, check, summary
from flux_megatron.cli import app
from flux_megatron.errors import BadInput


def case_of(pattern="ag_gemm", op="fc1", M=8192):
    (case,) = (c for c in suites.cases("gpt3-175b", pattern, (M,), 4) if c.op == op)
    return case


def outcomes(rows, case, connections="unset"):
    """Verdicts of one case by what they are about: "bound", "host time", or a competitor; of its
    rows beside others "beside E" and "beside slower".
    """
    found = {}
    for verdict in check(rows):
        if (verdict.case, verdict.connections) == (case, connections):
            about = [
                competitor
                for competitor in targets.COMPETITORS[case.pattern]
                if verdict.target.endswith(competitor)
            ]
            about += ["host time"] if "host time" in verdict.target else []
            if " beside, " in verdict.target:
                about = ["beside slower" if "never slower" in verdict.target else "beside E"]
            found[about[0] if about else "bound"] = verdict.outcome.verdict
    return found


GOOD = {"gemm": 3000.0, "serial": 3500.0, "serial_again": 3500.0, "auto": 3020.0,
        "async_tp": 3200.0, "te_ring": 3300.0, "xformers": 3400.0, "quack": 3150.0}  # fmt: skip


def test_good_rows_meet_everything():
    case = case_of()
    found = outcomes(rows_of(case, GOOD), case)
    nothing = dict.fromkeys(("beside E", "beside slower"), MISSING)
    good = dict.fromkeys(("bound", "async_tp", "te_ring", "xformers", "quack", "host time"), MET)
    assert found == good | nothing


def beside(case, changed, provenance=H200):
    """`GOOD` with other times, as rows of a run beside others."""
    rows = rows_of(case, GOOD | {"megatron": 3500.0} | changed, provenance)
    return [replace(row, beside=True) for row in rows]


@pytest.mark.parametrize("pattern", ["ag_gemm", "gemm_rs", "backward"])
@pytest.mark.parametrize(
    ("M", "auto", "expected"),
    [
        (8192, 3050.0, {"beside E": MET, "beside slower": MET}),  # E = .9
        (4096, 3051.0, {"beside E": MISSED, "beside slower": MET}),
        (2048, 3125.0, {"beside E": MET, "beside slower": MET}),  # E = .75
        (2048, 3126.0, {"beside E": MISSED, "beside slower": MET}),
        (2048, 3501.0, {"beside E": MISSED, "beside slower": MISSED}),
        (1024, 3500.0, {"beside slower": MET}),
        (64, 3501.0, {"beside slower": MISSED}),
    ],
)
def test_targets_beside_others(pattern, M, auto, expected):
    op = {"gemm_rs": "fc2"}.get(pattern, "fc1")
    case = case_of(pattern, op, M)
    found = outcomes(beside(case, {"auto": auto}), case)
    assert {about: found.pop(about) for about in expected} == expected
    assert set(found.values()) == {MISSING}, "rows beside others say nothing of those alone"


def test_rows_alone_and_beside_are_not_mixed():
    """Whichever comes later, in one run or another."""
    case = case_of()
    slow = beside(case, {"auto": 3400.0})
    for rows in (rows_of(case, GOOD) + slow, slow + rows_of(case, GOOD)):
        found = outcomes(rows, case)
        assert (found["bound"], found["beside E"]) == (MET, MISSED)
    later = beside(case, {"auto": 3000.0}, replace(H200, run="second"))
    found = outcomes(rows_of(case, GOOD) + slow + later, case)
    assert (found["bound"], found["beside E"]) == (MET, MET)


def test_rows_of_two_ranks_count_when_asked_for():
    (case,) = (c for c in suites.cases("gpt3-175b", "ag_gemm", (8192,), 2) if c.op == "fc1")
    rows = rows_of(case, GOOD, replace(H200, world_size=2))
    met = [v for v in check(rows, 2) if v.outcome.verdict == MET]
    assert {verdict.case for verdict in met} == {case}
    assert not [v for v in check(rows) if v.outcome.verdict == MET]


def test_a_good_case_says_nothing_of_others():
    case = case_of()
    rows = rows_of(case, GOOD)
    assert set(outcomes(rows, case, "1").values()) == {MISSING}
    assert set(outcomes(rows, case_of(M=4096)).values()) == {MISSING}
    assert set(outcomes(rows, case_of(op="qkv")).values()) == {MISSING}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"auto": 3026.0}, {"bound": MISSED}),  # E = .948
        ({"auto": 3025.0}, {"bound": MET}),
        ({"async_tp": 3020.0}, {"async_tp": MISSED, "xformers": MET}),  # a tie
        ({"xformers": 3019.9}, {"xformers": MISSED, "te_ring": MET}),
        ({"quack": 3020.0}, {"quack": MISSED, "xformers": MET}),
    ],
)
def test_one_time_too_many(changed, expected):
    case = case_of()
    found = outcomes(rows_of(case, GOOD | changed), case)
    assert {about: found[about] for about in expected} == expected


@pytest.mark.parametrize(
    ("status", "ahead"), [("missing", MISSING), ("failed", MISSING), ("wrong", MISSING)]
)
def test_a_peer_without_times(status, ahead):
    case = case_of()
    rows = [row for row in rows_of(case, GOOD) if row.candidate != "xformers"]
    assert outcomes(rows, case)["xformers"] == MISSING
    assert outcomes(rows, case)["te_ring"] == MET, "it is judged without the other"
    rows.append(row_of(case, "xformers", status=status))
    assert outcomes(rows, case)["xformers"] == ahead


@pytest.mark.parametrize("status", ["failed", "wrong"])
def test_ours_failing_is_missed(status):
    case = case_of()
    rows = [row for row in rows_of(case, GOOD) if row.candidate != "auto"]
    rows.append(row_of(case, "auto", status=status, reason="NaN"))
    rows += [replace(row, beside=True) for row in rows]
    assert set(outcomes(rows, case).values()) == {MISSED}


def test_host_time():
    case = case_of()
    rows = rows_of(case, GOOD)
    slow = [replace(row, host_us=25.1) if row.candidate == "auto" else row for row in rows]
    unknown = [replace(row, host_us=None) for row in rows]
    assert outcomes(slow, case)["host time"] == MISSED
    assert outcomes(unknown, case)["host time"] == MISSING


@pytest.mark.parametrize(
    "where",
    [
        {"gpu": "NVIDIA A100"},
        {"world_size": 2},
        {"dtype": "float32"},
        {"scale": 64},
        {"nvls": "on"},
    ],
)
def test_rows_of_another_machine_do_not_count(where):
    case = case_of()
    assert set(outcomes(rows_of(case, GOOD, replace(H200, **where)), case).values()) == {MISSING}


def test_too_few_rounds_do_not_count():
    case = case_of()
    assert outcomes(rows_of(case, GOOD, rounds=11), case)["bound"] == MISSING


def test_the_last_run_counts_and_is_not_mixed_with_others():
    case = case_of()
    later = replace(H200, run="second")
    slower = rows_of(case, GOOD | {"auto": 3400.0}, later)
    assert outcomes(rows_of(case, GOOD) + slower, case)["bound"] == MISSED
    assert outcomes(slower + rows_of(case, GOOD), case)["bound"] == MET
    only_auto = [row for row in slower if row.candidate == "auto"]
    assert outcomes(rows_of(case, GOOD) + only_auto, case)["bound"] == MISSING


SMALL = {"gemm": 80.0, "serial": 100.0, "serial_again": 101.0, "megatron": 100.0}


@pytest.mark.parametrize(
    ("pattern", "auto", "again", "expected"),
    [
        ("ag_gemm", 101.0, 101.0, MET),  # as slow as the noise is large
        ("ag_gemm", 101.1, 101.0, MISSED),
        ("ag_gemm", 101.0, 99.0, MET),  # noise has no sign
        ("ag_gemm", 100.1, 100.0, MISSED),
        ("ag_gemm", 103.0, 110.0, MISSED),  # a noisy run gets 2 % and no more
        ("backward", 101.0, 101.0, MET),
        ("backward", 102.0, 101.0, MISSED),
    ],
)
def test_never_slower(pattern, auto, again, expected):
    case = case_of(pattern, M=256)
    rows = rows_of(case, SMALL | {"auto": auto, "serial_again": again})
    assert outcomes(rows, case)["bound"] == expected


@pytest.mark.parametrize(("graph", "expected"), [(100.5, MET), (99.5, MISSED)])
def test_never_slower_than_a_graph_of_the_baseline(graph, expected):
    case = case_of("backward_ar", M=256)
    times = SMALL | {"auto": 100.0, "serial_again": 100.0, "megatron_graph": graph}
    assert outcomes(rows_of(case, times), case)["bound"] == expected


def test_noise_is_that_of_the_same_run_pattern_and_sizes():
    case = case_of(M=256)
    quiet = rows_of(case, SMALL | {"auto": 101.0, "serial_again": 100.0})
    loud = SMALL | {"auto": 100.0, "serial_again": 102.0}
    elsewhere = [
        *rows_of(case_of(M=1024), loud),
        *rows_of(case_of("gemm_rs", "fc2", M=256), loud),
        *rows_of(case_of(M=128), loud, replace(H200, run="other")),
    ]
    assert outcomes(quiet + elsewhere, case)["bound"] == MISSED
    assert outcomes(quiet + rows_of(case_of(M=128), loud), case)["bound"] == MET


@pytest.mark.parametrize(
    ("M", "auto", "expected"),
    [(8192, 1020.0, MET), (8192, 1021.0, MISSED), (2048, 1030.0, MET), (1024, 1061.0, MISSED)],
)
def test_backward_against_its_gemms(M, auto, expected):
    case = case_of("backward", M=M)
    rows = rows_of(case, {"gemm": 1000.0, "serial": 1200.0, "auto": auto})
    assert outcomes(rows, case)["bound"] == expected


@pytest.mark.parametrize(
    ("M", "ours", "expected"),
    [
        (4096, 100.0, MET),
        (4096, 100.1, MISSED),
        (512, 100.1, MISSED),
        (256, 103.0, MET),
        (64, 103.2, MISSED),
        (64, 9, MET),
    ],
)
def test_gemm_alone(M, ours, expected):
    case = case_of("gemm", M=M)
    assert outcomes(rows_of(case, {"gemm": 100.0, "ours_gemm": ours}), case)["bound"] == expected


@pytest.mark.parametrize(("peer", "expected"), [(99.9, MISSED), (100.0, MET), (None, MET)])
def test_gemm_alone_is_held_against_the_fastest_library(peer, expected):
    case = case_of("gemm", M=4096)
    rows = rows_of(case, {"gemm": 101.0, "ours_gemm": 100.0})
    rows.append(
        row_of(case, "quack_gemm", status="failed")
        if peer is None
        else rows_of(case, {"quack_gemm": peer})[0]
    )
    assert outcomes(rows, case)["bound"] == expected


def test_gemm_alone_is_also_taken_from_the_rows_of_a_pattern():
    times = {"gemm": 100.0, "ours_gemm": 101.1, "serial": 150.0, "auto": 110.0}
    beside = rows_of(case_of("gemm_rs", "qkv dgrad", 4096), times)
    gemm = case_of("gemm", "qkv dgrad", 4096)
    assert outcomes(beside, gemm)["bound"] == MISSED
    alone = rows_of(gemm, {"gemm": 100.0, "ours_gemm": 100.0})
    assert outcomes(beside + alone, gemm)["bound"] == MET, "its own rows come first"
    assert outcomes(beside, case_of("gemm", "qkv", 4096))["bound"] == MISSING


def test_nothing_measured_is_all_missing():
    verdicts = check([])
    assert {verdict.outcome.verdict for verdict in verdicts} == {MISSING}
    assert {verdict.connections for verdict in verdicts} == set(targets.CONNECTIONS)
    assert "0 met   0 missed  16 missing  connections 1, gemm_rs, M = 4096 .. 8192: E" in summary(
        verdicts
    )


def everything(pattern_times):
    """Rows that meet every target, for all cases and both settings."""
    rows = []
    for connections in targets.CONNECTIONS:
        provenance = replace(H200, run=f"run {connections}", max_connections=connections)
        for suite in suites.MODELS:
            for pattern, times in pattern_times.items():
                for case in suites.cases(suite, pattern, suites.ALL_M, 4):
                    alone = rows_of(case, times, provenance)
                    rows += [*alone, *(replace(row, beside=True) for row in alone)]
    return rows


def test_the_command_succeeds_only_when_everything_is_met(tmp_path):
    competitors = {name: 200.0 for names in targets.COMPETITORS.values() for name in names}
    times = {"gemm": 100.0, "serial": 150.0, "serial_again": 150.0, "megatron": 140.0}
    ours = {"auto": 101.0, "ours_gemm": 100.0}
    rows = everything(dict.fromkeys(suites.PATTERNS, times | ours | competitors))
    file = tmp_path / "rows.jsonl"
    records.append(file, rows)
    assert CliRunner().invoke(app, ["bench", "check", str(file)]).exit_code == 0
    records.append(file, rows_of(case_of(), GOOD | {"auto": 3400.0}, replace(H200, run="new")))
    result = CliRunner().invoke(app, ["bench", "check", "--quiet", str(file)])
    assert result.exit_code == 1
    assert "missed  connections unset, gpt3-175b fc1 M=8192: ag_gemm" in result.output


def test_rows_survive_the_file(tmp_path):
    rows = rows_of(case_of(), GOOD)
    file = tmp_path / "rows.jsonl"
    records.append(file, rows[:2])
    records.append(file, rows[2:])
    assert records.load(file) == rows
    old = file.read_text().replace(',"beside":false', "")
    file.write_text(old)
    assert records.load(file) == rows, "written before there were rows beside others"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pattern": None}, "pattern: input should be a valid string"),
        ({"M": "4096"}, "M: input should be a valid integer"),
        ({"median_us": "12 us"}, "median_us: input should be a valid number"),
        ({"times_us": [1.0, "2"]}, "times_us.1: input should be a valid number"),
        ({"beside": 1}, "beside: input should be a valid boolean"),
        ({"speed": 1.0}, "speed: unexpected keyword argument"),
        ({"provenance": {"gpu": "NVIDIA H200"}}, "provenance.run: field required"),
    ],
)
def test_a_line_that_is_no_row_is_named_with_its_field(tmp_path, changes, said):
    rows = rows_of(case_of(), GOOD)
    file = tmp_path / "rows.jsonl"
    records.append(file, rows)
    with file.open("a") as more:
        more.write(json.dumps(asdict(rows[0]) | changes) + "\n")
    place = f"rows.jsonl line {len(rows) + 1}: {said}"
    with pytest.raises(BadInput, match=rf"{re.escape(place)}.*; a row with suite, .* expected"):
        records.load(file)

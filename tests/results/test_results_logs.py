"""Logs are read as they were written, by every release, through restarts; bad lines are errors."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from written_runs import losses, megatron_line, megatron_process, write

from flux_megatron.lab.results import logs, summary
from flux_megatron.lab.results.iterations import ResultsError

# Printed by the statements of the releases' own training_log: iterations 1 and 2, 3 skipped without
# a finite loss, 4 with a loss that is no number.
TAIL = "| loss scale: 1.0 | grad norm: 3.210 | number of skipped iterations:   {} | number of nan iterations:   {} |"  # noqa: E501
BEFORE = "| throughput per GPU (TFLOP/s/GPU): 123.4 | learning rate: 1.000000E-04 | global batch size:     4 "  # noqa: E501
RECORDED = {
    "0.14 and 0.15": ("", ""),
    "0.16": (".123456", ""),
    "0.17, 0.18, 0.19, main": (".123456", "| lm loss: 0.000000E+00 "),
}


def recorded(release: str) -> str:
    fraction, zero = RECORDED[release]
    rows = [
        (1, "1234.5", "| lm loss: 1.082346E+01 ", 0),
        (2, "250.0", "| lm loss: 1.070000E+01 ", 0),
        (3, "300.0", zero, 1),
        (4, "1234.5", "", 0),
    ]
    return "".join(
        f" [2026-11-21 18:00:0{n}{fraction}] iteration        {n}/      50 | consumed samples:"
        f"           {4 * n:2d} | elapsed time per iteration (ms): {ms} {BEFORE}{loss}"
        f"{TAIL.format(skipped, skipped)}\n"
        for n, ms, loss, skipped in rows
    )


@pytest.mark.parametrize("release", RECORDED)
def test_every_release_is_read(tmp_path, release):
    write(tmp_path / "rank7.log", recorded(release))
    series = logs.of_megatron(tmp_path, global_batch=4)
    one, two, three, four = series.iterations
    assert (one.number, one.seconds, one.loss) == (1, 1.2345, 10.82346)
    assert (two.number, two.seconds, two.loss) == (2, 0.25, 10.7)
    assert (three.loss, three.skipped, three.nan) == (None, 1, 1)
    assert four.loss is not None
    assert math.isnan(four.loss)
    assert two.since == (2 if release.startswith("0.14") else 1)
    assert three.since == 3


def test_only_one_of_many_ranks_logs(tmp_path):
    """Others print what they like; a copy of the last rank's lines, prefixed, counts once."""
    text = megatron_process([0.2] * 5, losses(5))
    write(tmp_path / "node0" / "attempt_0" / "0" / "stdout.log", "building model\nno newline")
    text = "loading 10%\rloading 100%\r\n" + text
    write(tmp_path / "node1" / "attempt_0" / "7" / "stdout.log", text)
    write(tmp_path / "node1.out", "".join(f"[default7]:{line}\n" for line in text.splitlines()))
    series = logs.of_megatron(tmp_path, 8)
    assert [i.number for i in series.iterations] == [1, 2, 3, 4, 5]
    assert (series.torn, series.restarts, series.replaced) == (0, (), 0)


def test_a_later_attempt_replaces_what_it_repeats(tmp_path):
    """Killed after 9, requeued from the checkpoint at 5, killed after 7, requeued from 5 again."""
    for clock, first, last, seconds in ((0, 1, 9, 0.1), (100, 6, 7, 0.2), (200, 6, 8, 0.3)):
        n = last - first + 1
        text = megatron_process([seconds] * n, [float(clock + 1)] * n, first, clock=clock)
        write(tmp_path / f"{999 - clock}" / "rank.log", text)  # names do not tell the order
    series = logs.of_megatron(tmp_path, 8)
    assert [(i.number, round(i.seconds, 3), i.loss) for i in series.iterations] == [
        *((n, 0.1, 1.0) for n in range(1, 6)),
        *((n, 0.3, 201.0) for n in range(6, 9)),
    ]
    assert series.restarts == (6,)
    assert series.replaced == 4 + 2
    assert [i.number for i in series.warm(2)] == [3, 4, 5, 8]


def test_attempts_of_one_file(tmp_path):
    first = megatron_process([0.1] * 6, losses(6))
    second = megatron_process([0.2] * 3, [1.0] * 3, first=4, clock=60)
    write(tmp_path / "rank.log", first + second)
    series = logs.of_megatron(tmp_path, 8)
    assert [i.number for i in series.iterations] == [1, 2, 3, 4, 5, 6]
    assert series.restarts == (4,)
    assert series.iterations[-1].loss == 1.0


def test_the_second_line_of_a_process_is_a_mean_with_its_first(tmp_path):
    """So it is warm-up as long as the first one is, and its skips are not counted twice."""
    lines = [
        megatron_line(1, 9.0, None, skipped=1, nan=1),
        megatron_line(2, 4.6, 10.0, clock=1, skipped=1, nan=1),
        megatron_line(3, 0.2, 9.0, clock=2),
    ]
    write(tmp_path / "rank.log", "\n".join(lines) + "\n")
    series = logs.of_megatron(tmp_path, 8)
    assert [i.number for i in series.warm(1)] == [3]
    assert [i.skipped for i in series.iterations] == [1, 0, 0]


def test_a_resumed_training_is_a_straight_one_wherever_lines_cover_the_same(tmp_path):
    """The second line after a resume is a mean with the first one too: a straight run has none."""
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    write(straight / "rank.log", megatron_process([0.2] * 6, losses(6)))
    write(resumed / "0.log", megatron_process([0.2] * 3, losses(6)[:3]))
    write(resumed / "1.log", megatron_process([0.2] * 3, losses(6)[3:], first=4, clock=60))
    one, other = (logs.of_megatron(folder, 8) for folder in (straight, resumed))
    assert one.iterations[4].loss != other.iterations[4].loss
    assert summary.loss_differences(other, one) == {1: 0, 2: 0, 3: 0, 4: 0, 6: 0}


@pytest.mark.parametrize("kept", [5, 40, 150, 260])
def test_a_torn_last_line_is_counted(tmp_path, kept):
    text = megatron_process([0.2] * 3, losses(3))
    torn = megatron_line(4, 0.2, 3.0, clock=4)[: 30 + kept]
    write(tmp_path / "rank.log", text + torn)
    series = logs.of_megatron(tmp_path, 8)
    assert len(series.iterations) == 3
    assert series.torn == 1


BROKEN = {
    "no time": lambda line: line.replace("elapsed time per iteration (ms)", "elapsed"),
    "a word for a number": lambda line: line.replace("200.0", "fast"),
    "cut off": lambda line: line[:120],
    "another batch": lambda line: line.replace("batch size:     8", "batch size:    16"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_any_other_bad_line_is_an_error_that_names_it(tmp_path, how):
    text = megatron_process([0.2] * 3, losses(3))
    bad = BROKEN[how](megatron_line(4, 0.2, 3.0, clock=4)) + "\n"
    file = write(tmp_path / "rank.log", text + bad + megatron_line(5, 0.2, 3.0, clock=5) + "\n")
    with pytest.raises(ResultsError, match=f"^{file}:6: "):
        logs.of_megatron(tmp_path, 8)


def test_no_logs_are_an_empty_series(tmp_path):
    assert logs.of_megatron(tmp_path / "nowhere", 8).iterations == ()


ROWS = Path(__file__).parents[2] / "docs" / "results" / "h200x4" / "train_flux.jsonl"


def test_a_training_killed_in_the_middle_of_a_row(tmp_path):
    write(tmp_path / "metrics.jsonl", ROWS.read_text()[:-30])
    series = logs.of_train(tmp_path)
    assert len(series.iterations) == 199
    assert series.torn == 1


def test_where_a_resumed_training_began_is_in_its_rows(tmp_path):
    began = {**dict.fromkeys(range(1, 61), 1), **dict.fromkeys(range(61, 101), 61)}
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    resumed = [{**row, "first_step": began.get(row["step"], 101)} for row in rows]
    write(tmp_path / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in resumed))
    series = logs.of_train(tmp_path)
    assert series.restarts == (61, 101)
    warm = [i.number for i in series.warm(10)]
    assert warm == [*range(11, 61), *range(71, 101), *range(111, 201)]


@pytest.mark.parametrize("bad", ["{}", "\udcff", "not JSON", '{"step": 2, "loss": 1.0}', "[1]"])
def test_a_bad_row_is_an_error_that_names_it(tmp_path, bad):
    good = ROWS.read_text().splitlines(keepends=True)
    file, text = tmp_path / "metrics.jsonl", "".join([good[0], bad + "\n", good[2]])
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ResultsError, match=f"^{file}:2: "):
        logs.of_train(tmp_path)

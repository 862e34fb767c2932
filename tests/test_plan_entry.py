"""How entries are read: of older formats, with fields of later versions, or broken."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from test_plan_cache import ENTRY, PLAIN, at, opened

from flux_megatron.tuning import plan_cache, plan_entry

FORMATS = Path(__file__).parent / "plans"


def test_every_format_has_a_file_that_is_still_read(tmp_path):
    """As they were written then; their measurements stay, alone and beside others."""
    formats = [f"format_{n}" for n in (1, 2, 3, 4)]
    assert [file.stem for file in sorted(FORMATS.iterdir())] == formats
    for file in FORMATS.iterdir():
        folder = tmp_path / file.stem / "h200"
        folder.mkdir(parents=True)
        (folder / file.name).write_bytes(file.read_bytes())
        entries, left_out = plan_cache.read_folder(plan_entry.Entry, folder)
        assert left_out == []
        alone, beside = entries
        assert (alone.problem.beside, beside.problem.beside) == (False, True)
        assert alone.plan.strategy == alone.measured[0].plan.strategy == "hopper"
        assert len(alone.measured) == len(beside.measured) == 7
        assert alone.environment.sources == "format 1: 4a91cd5128db6a1c"
        plan_cache.write_file(folder / file.name, entries)
        assert plan_cache.read_folder(plan_entry.Entry, folder) == (entries, [])


@pytest.mark.parametrize(("written_in", "name"), [(1, "cut_shards"), (3, "split_k_shards")])
def test_plans_with_what_is_gone_give_way_to_the_fastest_of_the_others(tmp_path, written_in, name):
    """Tiles that were split early, and tiles of 192 columns."""
    raw = json.loads(ENTRY.dumps())
    slow = {"plan": json.loads(PLAIN.dumps()), "median_us": 9.0}
    wide = {"plan": raw["plan"] | {"tile": {"block_n": 192}, name: 0}, "median_us": 2.0}
    raw |= {"plan": raw["plan"] | {name: 2}, "measured": [wide, slow], "failed": []}
    cache = read(tmp_path, f'{{"format": {written_in}, "entries": [{json.dumps(raw)}]}}')
    assert cache.left_out == []
    (found,) = cache.entries
    assert found.plan == PLAIN
    assert found.measured == (plan_entry.Measured(PLAIN, 9.0),)


def test_a_file_of_the_present_format_is_what_is_written():
    """Else the format has changed: then raise `FORMAT`, and keep a file of the one before."""
    entries, _ = plan_cache.read_folder(plan_entry.Entry, FORMATS)
    (text,) = (file.read_text() for file in FORMATS.glob(f"*_{plan_entry.FORMAT}.json"))
    for entry in entries[-2:]:
        assert entry.dumps() in text
    assert len(plan_entry.MIGRATIONS) == plan_entry.FORMAT - 1


def changed(*path: str | int, value: object) -> str:
    """Two entries, the first with another value at the path; Ellipsis leaves the field out."""
    raw = json.loads(ENTRY.dumps())
    inner = raw
    for name in path[:-1]:
        inner = inner[name]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return f'{{"format": 3, "entries": [{json.dumps(raw)}, {at(64).dumps()}]}}'


def read(folder: Path, text: str):
    file = folder / "h200" / "one.json"
    file.parent.mkdir()
    file.write_text(text, errors="surrogateescape")
    cache = opened(folder)
    assert all(error.startswith(str(file)) for error in cache.left_out)
    return cache


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "left out, Expecting value"),
        ("{", "left out, Expecting property name"),
        ("\udcff", "left out, .*can't decode"),
        ("[]", "left out, a format and a list of entries expected"),
        ('{"format": "2", "entries": []}', "left out, a format and a list"),
        ('{"format": true, "entries": []}', "left out, a format and a list"),
        ('{"format": 0, "entries": []}', "left out, a format and a list"),
        ('{"format": 3, "entries": 3}', "left out, a format and a list"),
        ('{"format": 5, "entries": [{}]}', "left out, format 5; this version reads 1 to 4"),
        ('{"format": 3, "entries": [7]}', "entry 0: left out, entry: 7 given, an object"),
        ('{"format": 1, "entries": [{"problem": 3}]}', r"left out, entry: fields .* expected"),
        (changed("plan", "comm_rows", value="7"), "entry.plan.comm_rows: '7' given, int expected"),
        (changed("plan", "comm_rows", value=True), "entry.plan.comm_rows: True given"),
        (changed("plan", value=3), "entry.plan: 3 given, Plan expected"),
        (changed("plan", "strategy", value=...), "entry.plan: fields .'strategy'. expected"),
        (changed("problem", "pattern", value="gemm"), "'gemm' is not a valid Pattern"),
        (changed("problem", "experts", value=8), "entry.problem.experts = 8, which this version"),
        (changed("environment", "driver", value=...), "fields .'driver'. expected"),
        (changed("environment", "nccl", value="2.30"), "environment.nccl = '2.30', which this"),
        (changed("measured", value={}), "entry.measured: {} given, tuple expected"),
        (changed("measured", value=[3]), "entry.measured..: 3 given, Measured expected"),
        (changed("noise_us", value=None), "entry.noise_us: None given, float expected"),
    ],
)
def test_what_cannot_be_read_is_left_out_with_a_reason(tmp_path, text, reason):
    cache = read(tmp_path, text)
    (error,) = cache.left_out
    assert re.search(reason, error)
    # the others of the file stay
    assert cache.entries == ([at(64)] if at(64).dumps() in text else [])


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("plan", "warp"), 0),
        (("measured", 0, "plan", "tile", "swizzle"), False),
        (("problem", "experts"), 0),
        (("environment", "nccl"), ""),
        (("weather",), "fine"),
        (("measured", 1, "p80_us"), 3.0),
    ],
)
def test_a_field_of_a_later_version_that_says_as_before_is_ignored(tmp_path, path, value):
    """What is measured stays. One warning names the file and the field."""
    text = changed(*path, value=value)
    both = text.replace(
        at(64).dumps(), text[text.index("[") + 1 : text.index(f", {at(64).dumps()}")]
    )
    cache = read(tmp_path, both)
    assert cache.entries == [ENTRY, ENTRY]
    (error,) = cache.left_out
    assert f".{path[-1]} is ignored" in error


@pytest.mark.parametrize("field", ["comm_rows", "tile", "splits", "transport"])
def test_a_field_that_an_earlier_version_did_not_write_is_at_its_default(tmp_path, field):
    cache = read(tmp_path, changed("measured", 1, "plan", field, value=...))
    assert cache.left_out == []
    assert cache.entries == [ENTRY, at(64)]


def test_a_plan_that_asks_for_more_is_left_out_of_its_entry(tmp_path):
    """The best of the others takes its place."""
    raw = json.loads(ENTRY.dumps())
    for plan in (raw["plan"], raw["measured"][0]["plan"]):
        plan["clusters"] = 2
    cache = read(tmp_path, f'{{"format": 4, "entries": [{json.dumps(raw)}]}}')
    assert cache.entries == [replace(ENTRY, plan=PLAIN, measured=ENTRY.measured[1:])]
    (error,) = cache.left_out
    assert "plans with plan.clusters = 2, which this version does not know, are left out" in (error)


def test_so_is_a_plan_of_a_strategy_that_there_is_not(tmp_path):
    text = changed("measured", 1, "plan", "strategy", value="magic")
    cache = read(tmp_path, text)
    assert cache.entries == [replace(ENTRY, measured=ENTRY.measured[:1]), at(64)]
    (error,) = cache.left_out
    assert "plans of strategy 'magic' are left out" in error


def test_an_entry_without_any_plan_that_can_run_is_left_out(tmp_path):
    raw = json.loads(ENTRY.dumps())
    raw |= {"plan": {"strategy": "magic"}, "measured": []}
    cache = read(tmp_path, f'{{"format": 3, "entries": [{json.dumps(raw)}, {at(64).dumps()}]}}')
    assert cache.entries == [at(64)]
    (error,) = cache.left_out
    assert "entry 0: left out" in error


def test_a_line_of_the_tuner_is_read_whole():
    assert plan_entry.Entry.loads(ENTRY.dumps()) == ENTRY
    with pytest.raises(ValueError, match="warp"):
        plan_entry.Entry.loads(ENTRY.dumps().replace('"splits": 0', '"splits": 0, "warp": 0', 1))

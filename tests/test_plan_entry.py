"""How entries are read: of other formats, with fields of later versions, or broken."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from test_plan_cache import ENTRY, at, opened

from flux_megatron.tuning import plan_cache, plan_entry

FILE = Path(__file__).parent / "plans" / f"format_{plan_entry.FORMAT}.json"


def test_a_file_of_the_present_format_is_read_and_is_what_is_written(tmp_path):
    """Else the format has changed: then raise `FORMAT`, and keep a file of it here."""
    entries, left_out = plan_cache.read_file(plan_entry.Entry, FILE)
    assert left_out == []
    alone, beside = entries
    assert (alone.problem.beside, beside.problem.beside) == (False, True)
    assert alone.plan.strategy == alone.measured[0].plan.strategy == "hopper"
    assert len(alone.measured) == len(beside.measured) == 7
    assert all(entry.dumps() in FILE.read_text() for entry in entries)
    plan_cache.write_file(tmp_path / "one.json", entries)
    assert plan_cache.read_file(plan_entry.Entry, tmp_path / "one.json") == (entries, [])


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
    return f'{{"format": 4, "entries": [{json.dumps(raw)}, {at(64).dumps()}]}}'


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
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("\udcff", ".*can't decode"),
        ("[]", "a format and a list of entries expected"),
        ('{"format": "4", "entries": []}', "format 4; this version reads 4"),
        ('{"entries": []}', "format None; this version reads 4"),
        ('{"format": 4, "entries": 3}', "a format and a list"),
        ('{"format": 3, "entries": [{}]}', "format 3; this version reads 4"),
        ('{"format": 5, "entries": [{}]}', "format 5; this version reads 4"),
        ('{"format": 4, "entries": [7]}', "entry 0: entry: 7 given, Entry expected"),
        ('{"format": 4, "entries": [{"problem": 3}]}', r"entry: fields .* expected"),
        (changed("plan", "comm_rows", value="7"), "entry.plan.comm_rows: '7' given, int expected"),
        (changed("plan", "comm_rows", value=True), "entry.plan.comm_rows: True given"),
        (changed("plan", value=3), "entry.plan: 3 given, Plan expected"),
        (changed("plan", "strategy", value=...), "entry.plan: fields .'strategy'. expected"),
        (changed("problem", "pattern", value="gemm"), "'gemm' is not a valid Pattern"),
        (changed("problem", "experts", value=8), "entry.problem: fields .'experts'., which this"),
        (changed("environment", "driver", value=...), "fields .'driver'. expected"),
        (changed("environment", "nccl", value="2.30"), "environment: fields .'nccl'., which this"),
        (changed("measured", value={}), "entry.measured: {} given, tuple expected"),
        (changed("measured", value=[3]), "entry.measured..: 3 given, Measured expected"),
        (changed("measured", 1, "plan", "clusters", value=2), "fields .'clusters'., which"),
        (changed("weather", value="fine"), "entry: fields .'weather'., which this version"),
        (changed("noise_us", value=None), "entry.noise_us: None given, float expected"),
    ],
)
def test_what_cannot_be_read_is_left_out_with_a_reason(tmp_path, text, reason):
    cache = read(tmp_path, text)
    (error,) = cache.left_out
    assert re.search(reason, error)
    # the others of the file stay
    assert cache.entries == ([at(64)] if at(64).dumps() in text else [])


@pytest.mark.parametrize("field", ["comm_rows", "tile", "splits", "transport"])
def test_a_field_that_an_earlier_version_did_not_write_is_at_its_default(tmp_path, field):
    cache = read(tmp_path, changed("measured", 1, "plan", field, value=...))
    assert cache.left_out == []
    assert cache.entries == [ENTRY, at(64)]


def test_a_line_of_the_tuner_is_read_whole():
    raw = json.loads(ENTRY.dumps())
    assert plan_entry.decode(plan_entry.Entry, raw, "entry") == ENTRY
    raw["plan"]["warp"] = 0
    with pytest.raises(ValueError, match="warp"):
        plan_entry.decode(plan_entry.Entry, raw, "entry")

"""Measured plans on disk: found by every field of their key, never a crash, never lost."""

from __future__ import annotations

import json
import multiprocessing
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from flux_megatron.overlap import environment, plan_cache
from flux_megatron.overlap.environment import Environment
from flux_megatron.overlap.plan_cache import Entry, Failed, Measured, PlanCache
from flux_megatron.problem import Pattern, Plan, Problem, Tile

PROBLEM = Problem(Pattern.AG_GEMM, 8192, 49152, 12288, "bfloat16", 4)
HERE = Environment("NVIDIA H200", "nvlink", "580.65.06", "13.0", "2.11.0", "3.6.0", "1", "abc")
PLAN = Plan("pipelined", comm_rows=512)
PLAIN = Plan("sequential")
ENTRY = Entry(
    PROBLEM, HERE, PLAN, (Measured(PLAN, 3080.5), Measured(PLAIN, 3526.0)),
    (Failed(Plan("fused", tile=Tile(num_stages=5)), "OutOfResources: shared memory"),),
    untried=0, noise_us=3.0, rounds=12, date="2026-01-31T12:00:00+00:00",
)  # fmt: skip


def opened(*folders: Path, where: Environment = HERE) -> PlanCache:
    return PlanCache(folders, where)


def test_a_hit(tmp_path):
    file = plan_cache.store(tmp_path, ENTRY)
    assert file.parent == tmp_path / "h200"
    assert opened(tmp_path).find(PROBLEM) == ENTRY
    assert [path.name for path in file.parent.iterdir()] == [file.name]


PROBLEM_CHANGES = {
    "pattern": Pattern.GEMM_RS, "M": 4096, "N": 36864, "K": 8192, "dtype": "float16",
    "world_size": 8, "layout": "nn", "device": "cpu", "beside": True,
}  # fmt: skip


def test_every_field_of_the_problem_is_tried():
    assert PROBLEM_CHANGES.keys() == {field.name for field in fields(Problem)}


@pytest.mark.parametrize("field", PROBLEM_CHANGES)
def test_another_problem_is_a_miss(tmp_path, field):
    plan_cache.store(tmp_path, ENTRY)
    other = replace(PROBLEM, **{field: PROBLEM_CHANGES[field]})
    assert opened(tmp_path).find(other) is None
    near = opened(tmp_path).neighbours(other)
    assert near == ([ENTRY] if field == "M" else [])


@pytest.mark.parametrize("field", [field.name for field in fields(Environment)])
def test_another_environment_is_a_miss(tmp_path, field):
    plan_cache.store(tmp_path, ENTRY)
    value = "NVIDIA_H200" if field == "gpu" else "other"  # the same folder, another name
    cache = opened(tmp_path, where=replace(HERE, **{field: value}))
    assert cache.find(PROBLEM) is None
    same_machine = field not in ("gpu", "link")
    assert cache.neighbours(PROBLEM) == ([ENTRY] if same_machine else [])


def test_an_entry_that_says_nothing_of_others_is_of_the_problem_alone(tmp_path):
    """So those written before it could be said stay valid, under their old names."""
    assert '"beside"' not in ENTRY.dumps()
    before = plan_cache.store(tmp_path, ENTRY)
    assert before.stem.endswith("_tp4_7884ddf9c89c"), "the digest of what it depends on"
    beside = replace(ENTRY, problem=replace(PROBLEM, beside=True))
    assert '"beside": true' in beside.dumps()
    assert plan_cache.store(tmp_path, beside) != before
    cache = opened(tmp_path)
    assert cache.complaints == []
    assert cache.find(PROBLEM) == ENTRY
    assert cache.find(beside.problem) == beside
    assert cache.neighbours(replace(beside.problem, M=4096)) == [beside]


def at(M: int, where: Environment = HERE) -> Entry:
    return replace(ENTRY, problem=replace(PROBLEM, M=M), environment=where)


def test_neighbours_are_near_those_of_the_same_m_and_of_the_same_software_first(tmp_path):
    older = replace(HERE, torch="2.10.0")
    strange = replace(HERE, max_connections="other")
    for entry in [
        at(1024), at(1500), at(3072), at(4096), at(8192), at(2500, older), at(2048, strange)
    ]:  # fmt: skip
        plan_cache.store(tmp_path, entry)
    near = opened(tmp_path).neighbours(replace(PROBLEM, M=2048))
    found = [(entry.problem.M, entry.environment.torch) for entry in near]
    assert found == [
        (2048, "2.11.0"),
        (1500, "2.11.0"), (3072, "2.11.0"), (1024, "2.11.0"), (4096, "2.11.0"),
        (2500, "2.10.0"),
    ]  # fmt: skip


def test_the_first_folder_comes_first(tmp_path):
    mine, ours = tmp_path / "mine", tmp_path / "ours"
    plan_cache.store(ours, ENTRY)
    assert opened(mine, ours).find(PROBLEM) == ENTRY
    other = replace(ENTRY, plan=PLAIN)
    plan_cache.store(mine, other)
    assert opened(mine, ours).find(PROBLEM) == other


def test_a_file_holds_many_entries_one_a_line(tmp_path):
    file = tmp_path / "h200" / "gpt3.json"
    plan_cache.write_file(file, [at(M) for M in (1024, 2048, 4096)])
    assert len(file.read_text().splitlines()) == 5
    assert [entry.problem.M for entry in opened(tmp_path).entries] == [1024, 2048, 4096]


def broken(*path: str | int, value: object) -> str:
    """The entry's text with another value at the path; Ellipsis leaves the field out."""
    raw = json.loads(ENTRY.dumps())
    inner = raw
    for name in path[:-1]:
        inner = inner[name]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return f'{{"format": 1, "entries": [{json.dumps(raw)}, {ENTRY.dumps()}]}}'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("\udcff", "can't decode"),
        ("[]", "format 1 and a list of entries expected"),
        ('{"format": 2, "entries": []}', "format 1 and a list of entries expected"),
        ('{"format": 1, "entries": 3}', "format 1 and a list of entries expected"),
        ('{"format": 1, "entries": [7]}', "entry 0: entry: 7 given, Entry expected"),
        (broken("plan", "strategy", value="magic"), "entry 0: strategies .'magic'. given"),
        (broken("measured", 0, "plan", "strategy", value="magic"), "strategies .'magic'. given"),
        (broken("plan", "warp", value=3), r"entry.plan: fields .*'warp'.* given"),
        (broken("plan", "tile", "block_m", value=...), "entry.plan.tile: fields .* given"),
        (broken("plan", "comm_rows", value="7"), "entry.plan.comm_rows: '7' given, int expected"),
        (broken("plan", "comm_rows", value=True), "entry.plan.comm_rows: True given"),
        (broken("problem", "pattern", value="gemm"), "'gemm' is not a valid Pattern"),
        (broken("environment", "driver", value=...), "entry.environment: fields .* given"),
        (broken("measured", value={}), "entry.measured: {} given, tuple expected"),
        (broken("noise_us", value=None), "entry.noise_us: None given, float expected"),
    ],
    ids=lambda value: "whole file" if len(value) > 70 else None,
)
def test_what_cannot_be_read_is_left_out_with_a_reason(tmp_path, text, reason):
    file = tmp_path / "h200" / "bad.json"
    file.parent.mkdir()
    file.write_text(text, errors="surrogateescape")
    plan_cache.store(tmp_path, at(1024))
    cache = opened(tmp_path)
    assert cache.find(replace(PROBLEM, M=1024)) == at(1024)
    (complaint,) = cache.complaints
    assert complaint.startswith(str(file))
    assert re.search(reason, complaint)
    good = 2 if ENTRY.dumps() in text else 1
    assert len(cache.entries) == good


def write_many(folder: Path, job: int) -> None:
    for M in range(64, 64 * 21, 64):
        plan_cache.store(folder, at(M))  # the keys of the others too
        plan_cache.store(folder, at(M * 10_000 + job))


def test_jobs_that_write_at_once_lose_nothing(tmp_path):
    context = multiprocessing.get_context("fork")
    jobs = [context.Process(target=write_many, args=(tmp_path, job)) for job in range(3)]
    for job in jobs:
        job.start()
    while any(job.is_alive() for job in jobs):
        assert opened(tmp_path).complaints == []  # no reader sees half a file
    for job in jobs:
        job.join()
        assert job.exitcode == 0
    assert len(opened(tmp_path).entries) == 20 * (1 + 3)
    assert all(path.suffix == ".json" for path in (tmp_path / "h200").iterdir())


def test_the_folder_of_a_gpu():
    names = ["NVIDIA H200", "NVIDIA H100 80GB HBM3", "cpu"]
    assert [plan_cache.slug(name) for name in names] == ["h200", "h100-80gb-hbm3", "cpu"]


def test_every_shipped_entry_can_be_read():
    for folder in plan_cache.shipped().iterdir():
        if folder.is_dir():
            entries, complaints = plan_cache.read_folder(folder)
            assert complaints == []
            assert {plan_cache.slug(entry.environment.gpu) for entry in entries} == {folder.name}


@pytest.fixture
def package(tmp_path):
    for name, text in {
        "kernels/gemm.py": "def f(x):\n    return x + 1\n",
        "overlap/fused.py": "y = 2\n",
        "overlap/tuner.py": "z = 3\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "text", "changes"),
    [
        ("kernels/gemm.py", "def f(x):\n    return x + 2\n", True),
        (
            "kernels/gemm.py",
            '"""Text."""\ndef f(x):\n    """More."""\n    return x+1  # 1\n',
            False,
        ),
        ("overlap/fused.py", "y = 3\n", True),
        ("overlap/tuner.py", "z = 4\n", False),
        ("symm/buffer.py", "a = 1\n", True),
    ],
)
def test_the_digest_of_the_sources_follows_what_runs(package, file, text, changes):
    before = environment.sources_digest(package)
    (package / file).parent.mkdir(exist_ok=True)
    (package / file).write_text(text)
    assert (environment.sources_digest(package) != before) == changes


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build",
         "580.65.06"),
        ("something else", "unknown"),
    ],
)  # fmt: skip
def test_the_driver(tmp_path, text, version):
    (tmp_path / "version").write_text(text)
    assert environment.driver_version(tmp_path / "version") == version
    assert environment.driver_version(tmp_path / "none") == "unknown"

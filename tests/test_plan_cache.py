"""Measured plans on disk: found by every field of their key, never a crash, never lost; entries of
other formats, with fields of later versions, or broken.
"""

import errno
import json
import multiprocessing
import os
import pkgutil
import re
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from functools import reduce
from operator import getitem
from pathlib import Path
from unittest import mock

import pytest
import torch

from flux_megatron import shipped
from flux_megatron.problem import Pattern, Plan, Problem, Tile
from flux_megatron.tuning import environment, plan_cache, plan_entry
from flux_megatron.tuning.environment import Environment
from flux_megatron.tuning.plan_cache import PlanCache
from flux_megatron.tuning.plan_entry import Entry, Failed, Measured

PROBLEM = Problem(Pattern.AG_GEMM, 8192, 49152, 12288, "bfloat16", 4)
KIND = replace(PROBLEM, M=0)
HERE = Environment("NVIDIA H200", "nvlink", "580.65.06", "13.0", "2.11.0", "3.6.0", "1", "abc")
PLAN = Plan("fused", comm_rows=512)
PLAIN = Plan("sequential")
ENTRY = Entry(
    PROBLEM, HERE, PLAN, (Measured(PLAN, 3080.5), Measured(PLAIN, 3526.0)),
    (Failed(Plan("fused", tile=Tile(num_stages=5)), "OutOfResources: shared memory"),),
    untried=0, noise_us=3.0, rounds=12, date="2026-01-31T12:00:00+00:00",
)  # fmt: skip


def opened(*folders: Path, where: Environment = HERE) -> PlanCache:
    return PlanCache(folders, where)


def test_a_hit_and_what_is_measured_again_takes_its_place(tmp_path):
    """Whatever became of the sources meanwhile."""
    file = plan_cache.store(tmp_path, ENTRY)
    assert file.parent == tmp_path / "h200"
    assert opened(tmp_path).find(PROBLEM) == ENTRY
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    other = replace(ENTRY, plan=PLAIN, environment=replace(HERE, sources="later"))
    assert plan_cache.store(tmp_path, other) == file
    assert opened(tmp_path).entries == [other]


def test_what_is_kept_is_found_at_once_and_others_may_read_it(tmp_path):
    device = torch.device("cpu")
    plan_cache.opened.cache_clear()
    cache = plan_cache.opened(tmp_path, device)
    entry = replace(ENTRY, environment=environment.of(device))
    plan_cache.keep(entry, tmp_path, device)
    assert cache.find(PROBLEM) == entry
    (file,) = tmp_path.rglob("*.json")
    assert file.stat().st_mode & 0o777 == 0o644


PROBLEM_CHANGES = {
    "pattern": Pattern.GEMM_RS, "M": 4096, "N": 36864, "K": 8192, "dtype": "float16",
    "world_size": 8, "layout": "nn", "device": "cpu", "beside": True, "out_dtype": "bfloat16",
    "split_accumulator": True, "blockwise": True, "wire": True,
}  # fmt: skip


@pytest.mark.parametrize("field", [field.name for field in fields(Problem)])
def test_another_problem_is_a_miss(tmp_path, field):
    plan_cache.store(tmp_path, ENTRY)
    other = replace(PROBLEM, **{field: PROBLEM_CHANGES[field]})
    assert opened(tmp_path).find(other) is None
    alike = opened(tmp_path).of_kind(replace(other, M=0), here=True)
    assert alike == ([ENTRY] if field == "M" else [])


@pytest.mark.parametrize("field", [field.name for field in fields(Environment)])
def test_another_environment_is_a_miss(tmp_path, field):
    plan_cache.store(tmp_path, ENTRY)
    value = "NVIDIA_H200" if field == "gpu" else "other"  # the same folder, another name
    cache = opened(tmp_path, where=replace(HERE, **{field: value}))
    assert cache.find(PROBLEM) is None
    same_machine = field not in ("gpu", "link")
    assert cache.of_kind(KIND, here=False) == ([ENTRY] if same_machine else [])
    assert cache.of_kind(KIND, here=True) == []


def test_a_kind_has_entries_of_every_m_those_of_this_software_first(tmp_path):
    here, other = at(8192), at(64, replace(HERE, driver="1", sources="old", max_connections="8"))
    others = [replace(PROBLEM, **{field: value}) for field, value in PROBLEM_CHANGES.items()]
    of_others = [replace(ENTRY, problem=problem) for problem in others if problem.M == PROBLEM.M]
    hidden = at(4096, replace(HERE, link=HERE.link + ", hidden"))
    for entry in (*of_others, at(2048, replace(HERE, link="pcie")), other, hidden, here):
        plan_cache.store(tmp_path, entry)
    first, *rest = opened(tmp_path).of_kind(KIND, here=False)
    assert first == here
    assert sorted(rest, key=lambda one: one.problem.M) == [other, hidden]
    assert opened(tmp_path).of_kind(KIND, here=True) == [here]
    under_ray = opened(tmp_path, where=hidden.environment)
    assert under_ray.of_kind(KIND, here=False)[0] == hidden
    assert under_ray.of_kind(KIND, here=True) == [hidden]


def at(M: int, where: Environment = HERE) -> Entry:
    return replace(ENTRY, problem=replace(PROBLEM, M=M), environment=where)


def test_the_first_folder_comes_first(tmp_path):
    mine, ours = tmp_path / "mine", tmp_path / "ours"
    plan_cache.store(ours, ENTRY)
    assert opened(mine, ours).find(PROBLEM) == ENTRY
    other = replace(ENTRY, plan=PLAIN)
    plan_cache.store(mine, other)
    assert opened(mine, ours).find(PROBLEM) == other


def write_many(folder: Path, job: int) -> None:
    for M in range(64, 64 * 21, 64):
        plan_cache.store(folder, at(M))  # the keys of the others too
        plan_cache.store(folder, at(M * 10_000 + job))


def test_jobs_that_write_at_once_lose_nothing(tmp_path):
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(3, context) as pool:
        jobs = [pool.submit(write_many, tmp_path, job) for job in range(3)]
        while not all(job.done() for job in jobs):
            assert opened(tmp_path).left_out == []  # no reader sees half a file
    assert [job.result() for job in jobs] == [None] * 3
    assert len(opened(tmp_path).entries) == 20 * (1 + 3)
    assert all(path.suffix == ".json" for path in (tmp_path / "h200").iterdir())


def test_every_shipped_entry_can_be_read_in_the_folder_of_its_gpu():
    names = ["NVIDIA H200", "NVIDIA H100 80GB HBM3", "cpu"]
    assert [plan_cache.slug(name) for name in names] == ["h200", "h100-80gb-hbm3", "cpu"]
    for folder in (shipped.folder("configs") / "tuned").iterdir():
        if folder.is_dir():
            entries, left_out = plan_cache.read_folders(folder)
            assert left_out == []
            assert {plan_cache.slug(entry.environment.gpu) for entry in entries} == {folder.name}


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Build", "580.65.06"),
        ("something else", "unknown"),
    ],
)
def test_the_driver(tmp_path, text, version):
    (tmp_path / "version").write_text(text)
    assert environment.driver_version(tmp_path / "version") == version
    assert environment.driver_version(tmp_path / "none") == "unknown"


FILE = Path(__file__).parent / "plans" / f"format_{plan_entry.FORMAT}.json"


def test_a_file_of_the_present_format_is_read_and_is_what_is_written(tmp_path):
    """Else the format has changed: then raise `FORMAT`, and keep a file of it here."""
    entries, left_out = plan_cache.read_file(FILE)
    assert left_out == []
    alone, beside = entries
    assert (alone.problem.beside, beside.problem.beside) == (False, True)
    assert alone.plan.strategy == alone.measured[0].plan.strategy == "hopper"
    assert len(alone.measured) == len(beside.measured) == 7
    assert all(entry.dumps() in FILE.read_text() for entry in entries)
    plan_cache.write_file(tmp_path / "one.json", entries)
    assert plan_cache.read_file(tmp_path / "one.json") == (entries, [])


def changed(*path: str | int, value: object) -> str:
    """Two entries, the first with another value at the path; Ellipsis leaves the field out."""
    raw = json.loads(ENTRY.dumps())
    *outer, name = path
    inner = reduce(getitem, outer, raw)
    inner[name] = value
    if value is ...:
        del inner[name]
    return f'{{"format": 5, "entries": [{json.dumps(raw)}, {at(64).dumps()}]}}'


def read(folder: Path, text: str):
    file = folder / "h200" / "one.json"
    file.parent.mkdir()
    file.write_text(text, errors="surrogateescape")
    cache = opened(folder)
    assert all(error.startswith(str(file)) for error in cache.left_out)
    return cache


TOO_LARGE = {"strategy": "fused", "tile": vars(Tile(256, 256, num_stages=4))}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("\udcff", ".*can't decode"),
        ("[]", "a format and a list of entries expected"),
        ('{"format": "5", "entries": []}', "format 5; this version reads 5"),
        ('{"entries": []}', "format None; this version reads 5"),
        ('{"format": 5, "entries": 3}', "a format and a list"),
        ('{"format": 3, "entries": [{}]}', "format 3; this version reads 5"),
        ('{"format": 6, "entries": [{}]}', "format 6; this version reads 5"),
        ('{"format": 5, "entries": [7]}', "entry 0: entry: 7 given, Entry expected"),
        ('{"format": 5, "entries": [{"problem": 3}]}', r"entry: fields .* expected"),
        (changed("plan", "comm_rows", value="7"), "entry.plan.comm_rows: '7' given, int expected"),
        (changed("plan", "comm_rows", value=True), "entry.plan.comm_rows: True given"),
        (changed("plan", value=3), "entry.plan: 3 given, Plan expected"),
        (changed("plan", "strategy", value=...), "entry.plan: fields .'strategy'. expected"),
        (changed("problem", "M", value=0), "M 0 given, 1 or more expected"),
        (changed("problem", "pattern", value="gemm"), "'gemm' is not a valid Pattern"),
        (changed("problem", "experts", value=8), "entry.problem: fields .'experts'., which this"),
        (changed("environment", "driver", value=...), "fields .'driver'. expected"),
        (changed("environment", "nccl", value="2.30"), "environment: fields .'nccl'., which this"),
        (changed("measured", value={}), "entry.measured: {} given, tuple expected"),
        (changed("measured", value=[3]), "entry.measured..: 3 given, Measured expected"),
        (changed("measured", 1, "plan", "clusters", value=2), "fields .'clusters'., which"),
        (changed("weather", value="fine"), "entry: fields .'weather'., which this version"),
        (changed("noise_us", value=None), "entry.noise_us: None given, float expected"),
        (changed("plan", "tile", "block_n", value=96), "128, 96, 64, 8. given, powers of two"),
        (changed("plan", "tile", "num_stages", value=0), "num_stages 0 given, 1 or more expected"),
        (changed("plan", "strategy", value="magic"), "ag_gemm M=8192 .* magic is not built for"),
        (changed("plan", value=TOO_LARGE), "by .*: a tile of 256 x 256 x 64 .* shared memory"),
    ],
)
def test_what_cannot_be_read_is_left_out_with_a_reason(tmp_path, text, reason):
    cache = read(tmp_path, text)
    (error,) = cache.left_out
    assert re.search(reason, error)
    # the others of the file stay
    assert cache.entries == ([at(64)] if at(64).dumps() in text else [])


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO, errno.EACCES, errno.EBUSY])
@pytest.mark.parametrize("where", ["os.listdir", "os.stat", "pathlib.Path.read_text"])
def test_a_file_system_that_fails_is_a_miss_with_its_reason(tmp_path, where, code):
    """One folder of two; `stat` is not asked."""
    mine, ours = tmp_path / "mine", tmp_path / "ours"
    for folder in (mine, ours):
        plan_cache.store(folder, ENTRY)
    whole = pkgutil.resolve_name(where)

    def fail(path: Path, *given, **options):
        if mine in (path, *Path(path).parents):
            raise OSError(code, os.strerror(code), str(path))
        return whole(path, *given, **options)

    with mock.patch(where, fail):
        cache = opened(mine, ours)
    assert len(cache.entries) == (2 if where == "os.stat" else 1)
    for reason in cache.left_out:
        assert reason.startswith(str(mine / "h200"))
        assert f"[Errno {code}] {os.strerror(code)}" in reason
    assert len(cache.left_out) == 2 - len(cache.entries)


@pytest.mark.parametrize(
    "where", ["tempfile.NamedTemporaryFile", "os.chmod", "os.replace", "write"]
)
def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path, where):
    file = plan_cache.store(tmp_path, ENTRY)
    full, begin = OSError(errno.ENOSPC, "No space left"), tempfile.NamedTemporaryFile

    def begun(*given, **options):
        partial = begin(*given, **options)
        partial.write = mock.Mock(side_effect=full)
        return partial

    fails = (
        mock.patch(where, side_effect=full)
        if "." in where
        else mock.patch("tempfile.NamedTemporaryFile", begun)
    )
    with fails, pytest.raises(OSError, match="No space left"):
        plan_cache.store(tmp_path, replace(ENTRY, plan=PLAIN))
    assert [*file.parent.iterdir()] == [file]
    assert opened(tmp_path).entries == [ENTRY]


def test_a_field_that_an_earlier_version_did_not_write_is_at_its_default(tmp_path):
    cache = read(tmp_path, changed("measured", 0, "plan", "tile", value=...))
    assert cache.left_out == []
    assert cache.entries == [ENTRY, at(64)]


def test_a_line_of_the_tuner_is_read_whole():
    raw = json.loads(ENTRY.dumps())
    assert plan_entry.decode(Entry, raw, "entry") == ENTRY
    raw["plan"]["warp"] = 0
    with pytest.raises(ValueError, match="warp"):
        plan_entry.decode(Entry, raw, "entry")

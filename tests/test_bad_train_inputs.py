"""Bad inputs of `flux-megatron train` and `generate`: one line each, that names what is wrong and
the way out, before any rank starts. A few faults that only ranks can find follow.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("megatron.core", reason="needs the extra `train`")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forked_processes import command_line, import_what_ranks_import, kept
from megatron.core import parallel_state
from ranks import run_ranks
from rich.console import Console
from typer.testing import CliRunner

from flux_megatron import cli, settings
from flux_megatron.integration.cpu_device import pretend_cuda
from flux_megatron.lab.train import (
    checkpoint,
    config,
    data,
    launcher,
    loop,
    run_folder,
    text_files,
    worker,
)  # fmt: skip
from flux_megatron.lab.train.config import ConfigError, DataConfig
from flux_megatron.lab.train.model import Trainee, layer_context

DEMO = Path(__file__).parent.parent / "configs" / "train" / "demo.yaml"
TINY = {
    "model.num_layers": 1, "model.hidden": 32, "model.heads": 4, "model.ffn": 64,
    "model.seq_length": 32, "train.micro_batch": 1, "train.global_batch": 2,
    "train.warmup_steps": 1, "train.save_every": None, "train.log_every": 1,
    "parallel.device": "cpu", "layers": "stock",
}  # fmt: skip
WORDS = " ".join(f"{i} is {i * i}." for i in range(3000))


@pytest.fixture
def places(tmp_path, monkeypatch) -> Iterator[dict[str, Path]]:
    """What rows call {text}, {run} (two whole checkpoints, four steps), {new} and {tmp}."""
    text, run = tmp_path / "text", tmp_path / "run"
    text.mkdir()
    (text / "words.txt").write_text(WORDS)
    for step in (2, 4):
        folder = run / "checkpoints" / f"step_{step}"
        dcp.save({"x": torch.arange(500.0)}, checkpoint_id=folder, no_dist=True)
        torch.save({"step": step}, folder / "common.pt")
    (run / "checkpoints" / "latest").write_text("step_4\n")
    recorded = config.load(DEMO, TINY | {"data.path": str(text)})
    (run / "config.json").write_text(recorded.model_dump_json())
    rows = "".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in (1, 2, 3, 4))
    (run / "metrics.jsonl").write_text(rows)
    monkeypatch.setattr(launcher, "gpu_count", lambda: 0)
    monkeypatch.setattr(launcher, "run_ranks", lambda *_: pytest.fail("ranks were started"))
    settings.get.cache_clear()
    yield {"tmp": tmp_path, "text": text, "run": run, "new": tmp_path / "new"}
    settings.get.cache_clear()


class Row(NamedTuple):
    """`words` after `start`; `prepare(places)` breaks something before; `said` is in the line."""

    words: str
    said: list[str]
    start: str = "train --out {new} --data {text}"
    prepare: Callable[[dict[str, Path]], object] = lambda places: None


RESUME = "train --out {run} --data {text} --resume"
GENERATE = "generate --checkpoint {run} --prompt a --tokens 4"


def tiny_words() -> list[str]:
    values = {key: "null" if value is None else value for key, value in TINY.items()}
    return [part for key, value in values.items() for part in ("--set", f"{key}={value}")]


def written(file: str, content: str | bytes) -> Callable[[dict[str, Path]], object]:
    def prepare(places: dict[str, Path]) -> None:
        path = Path(file.format(**places))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return prepare


def cut(file: str, size: int = 10) -> Callable[[dict[str, Path]], object]:
    return lambda places: os.truncate(file.format(**places), size)


def of_step(step: int, name: str = "__0_0.distcp") -> str:
    return f"{{run}}/checkpoints/step_{step}/{name}"


def both_torn(places: dict[str, Path]) -> None:
    cut(of_step(2))(places)
    cut(of_step(4))(places)


ECHO_2 = "step_2 is the newest whole one: echo step_2 > {run}/checkpoints/latest"
ROWS = {
    "config: missing": Row("--config {tmp}/no.yaml", ["no.yaml: No such file"]),
    "config: a folder": Row("--config {tmp}", ["--config {tmp}: Is a directory"]),
    "config: bytes": Row(
        "--config {tmp}/b", ["--config {tmp}/b: not a text file"],
        prepare=written("{tmp}/b", b"\xff\x00\xfe")),
    "config: not YAML": Row(
        "--config {tmp}/b", ["{tmp}/b: not YAML"], prepare=written("{tmp}/b", "a: [1\nb: 2\n")),
    "config: a list": Row(
        "--config {tmp}/b", ["a mapping expected, list given"],
        prepare=written("{tmp}/b", "- 1\n")),
    "config: a key twice": Row(
        "--config {tmp}/b", ["given twice: a"], prepare=written("{tmp}/b", "a: 1\na: 2\n")),
    "config: nothing": Row(
        "--config {tmp}/b", ["{tmp}/b: train.steps: Field required", "train.lr"],
        prepare=written("{tmp}/b", "")),
    "set: half a list": Row("--set train.lr=[1", ["--set: train.lr: not YAML: '[1'"]),
    "set: no day": Row("--set train.lr=2026-99-99", ["--set: train.lr: not YAML: '2026-99-99'"]),
    "set: no value": Row("--set train.lr", ["'train.lr' given, key=value expected"]),
    "set: no key": Row("--set =3", ["'=3' given, key=value expected"]),
    "set: a word": Row("--set train.lr=abc", ["train.lr: ", "valid number", "'abc' given by"]),
    "set: a word beside a flag": Row(
        "--set train.steps=1e9x", ["train.steps: ", "'1e9x' given by --set"]),
    "set: a switch": Row("--set train.log_every=true", ["valid integer, True given by --set"]),
    "set: a text": Row("--set train.log_every='3'", ["valid integer, '3' given by --set"]),
    "set: more than any run has": Row(
        "--set train.steps=1000000000000000000000", ["train.steps: ", "2147483647"]),
    "set: infinite": Row("--set train.lr=.inf", ["train.lr: ", "finite", "inf given by --set"]),
    "set: nan": Row("--set train.lr=.nan", ["train.lr: ", "nan given by --set"]),
    "set: negative": Row("--set train.lr=-1", ["train.lr: ", "greater than 0, -1 given by --set"]),
    "set: min_lr": Row("--set train.min_lr=1", ["min_lr=1.0 must not be above train.lr=0.001"]),
    "set: a typo": Row("--set model.hiden=64", ["model.hiden: unknown key", "model.hidden exp"]),
    "set: a section": Row("--set model=3", ["model: ", "3 given by --set"]),
    "set: no section": Row("--set model.hidden.x=3", ["'hidden' is not a section"]),
    "set: zero": Row("--set model.hidden=0", ["model.hidden: ", "0 given by --set"]),
    "set: a fraction": Row("--set model.hidden=12.5", ["model.hidden: ", "12.5 given by --set"]),
    "set: heads": Row("--set model.heads=7", ["hidden=32 must be divisible by model.heads=7"]),
    "set: seed": Row("--set train.seed=4294967296", ["train.seed: ", "4294967295, 4294967296"]),
    "set: dtype": Row("--set train.dtype=fp8", ["train.dtype: ", "'bfloat16'", "'fp8' given"]),
    "set: layers": Row("--set layers=fluks", ["layers: ", "'flux', 'stock'", "'fluks' given"]),
    "set: strategy": Row("--set strategy=magic", ["strategy: ", "'fused'", "'magic' given"]),
    "set: batch": Row(
        "--set train.micro_batch=3", ["global_batch=2 must be divisible by train.micro_batch=3"]),
    "set: warmup": Row(
        "--set train.warmup_steps=200", ["warmup_steps=200 must be below train.decay_steps=100"]),
    "set: device": Row("--set parallel.device=tpu", ["parallel.device: ", "'tpu' given by --set"]),
    "set: no GPUs": Row("--set parallel.device=cuda", ["2 ranks need as many GPUs, found 0"]),
    "set: odd ranks": Row("--set parallel.world_size=3", ["world_size=3 must be divisible by"]),
    "set: processes": Row("--set parallel.world_size=4000", ["4000 ranks given, at most 64"]),
    "tp: none": Row("--tp 0", ["parallel.tp: ", "greater than 0, 0 given by --tp"]),
    "tp: odd": Row("--tp 3", ["model.heads=4 must be divisible by parallel.tp=3"]),
    "steps: none": Row("--steps 0", ["train.steps: ", "0 given by --steps"]),
    "steps: a word": Row("--steps ten", ["'--steps'", "'ten'"]),
    "data: missing": Row("--data {tmp}/no", ["data.path: {tmp}/no is not a folder"]),
    "data: a file": Row("--data {text}/words.txt", ["words.txt is not a folder"]),
    "data: no file": Row(
        "--data {tmp}/none", ["no text file in {tmp}/none matches '*'"],
        prepare=lambda places: (places["tmp"] / "none").mkdir()),
    "data: no text": Row(
        "--data {tmp}/b", ["no text file in {tmp}/b"], prepare=written("{tmp}/b/x", b"\0\0")),
    "data: too short": Row(
        "--data {tmp}/b", ["4 tokens in {tmp}/b, 33 or more expected", "model.seq_length=32"],
        prepare=written("{tmp}/b/x", b"abc")),
    "data: pattern": Row("--set data.pattern=a*.rst", ["no text file in {text} matches 'a*.rst'"]),
    "data: absolute": Row("--set data.pattern=/x", ["data.pattern: '/x' given, a pattern such as"]),
    "out: a file": Row(
        "--out {tmp}/b", ["--out {tmp}/b: ", "(Not a directory): a folder with room expected"],
        prepare=written("{tmp}/b", "")),
    "out: below a file": Row(
        "--out {tmp}/b/c", ["--out {tmp}/b/c: ", "cannot be written (Not a directory)"],
        prepare=written("{tmp}/b", "")),
    "out: impossible": Row("--out /proc/run", ["--out /proc/run: /proc/run cannot be written"]),
    "out: a loop": Row(
        "--out {tmp}/loop", ["--out {tmp}/loop: ", "Too many levels of symbolic links"],
        prepare=lambda places: (places["tmp"] / "loop").symlink_to("loop")),
    "data: a loop": Row(
        "--data {tmp}/loop", ["data.path: {tmp}/loop is not a folder"],
        prepare=lambda places: (places["tmp"] / "loop").symlink_to("loop")),
    "out: too long": Row("--out {tmp}/" + 300 * "a", ["File name too long"]),
    "out: used": Row("--out {run}", ["{run} is not empty: give another --out, or --resume"]),
    "resume: mistyped": Row("--out {tmp}/rum", ["--resume: {tmp}/rum holds no run"], RESUME),
    "resume: no run": Row("--out {text}", ["{text} holds no run (no config.json)"], RESUME),
    "resume: torn config": Row(
        "", ["{run}/config.json cannot be read (Invalid JSON"], RESUME, cut("{run}/config.json")),
    "resume: config of bytes": Row(
        "", ["{run}/config.json cannot be read"], RESUME, written("{run}/config.json", b"\xff\0")),
    "resume: other model": Row(
        "--set model.ffn=128", ["cannot be resumed with other settings: model.ffn: 64 -> 128"],
        RESUME),
    "resume: other text": Row(
        "--data {tmp}/b", ["data.path: {text} -> {tmp}/b"], RESUME, written("{tmp}/b/x", WORDS)),
    "resume: tp": Row("--tp 3", ["model.heads=4 must be divisible by parallel.tp=3"], RESUME),
    "resume: dangling latest": Row(
        "", ["latest says 'step_7', expected one of ['step_2', 'step_4']; echo step_4 > {run}"],
        RESUME, written("{run}/checkpoints/latest", "step_7\n")),
    "resume: empty latest": Row(
        "", ["latest says '', expected one of"], RESUME, written("{run}/checkpoints/latest", "")),
    "resume: torn checkpoint": Row(
        "", ["{run}/checkpoints/step_4/__0_0.distcp has 10 bytes, ", ECHO_2], RESUME,
        cut(of_step(4))),
    "resume: missing file": Row(
        "", ["step_4/__0_0.distcp has 0 bytes, ", ECHO_2], RESUME,
        lambda places: Path(of_step(4).format(**places)).unlink()),
    "resume: torn metadata": Row(
        "", ["step_4/.metadata cannot be read", ECHO_2], RESUME, cut(of_step(4, ".metadata"))),
    "resume: torn common": Row(
        "", ["step_4/common.pt is missing or torn", ECHO_2], RESUME, cut(of_step(4, "common.pt"))),
    "resume: all torn": Row("", ["has no other whole one: train anew"], RESUME, both_torn),
    "resume: torn row": Row(
        "", ["{run}/metrics.jsonl: line 2 is no row", "remove it"], RESUME,
        written("{run}/metrics.jsonl", b'{"step": 1}\n{"st\xff\n{"step": 3}\n')),
    "resume: no row": Row(
        "", ["{run}/metrics.jsonl: line 1 is no row"], RESUME,
        written("{run}/metrics.jsonl", "3\n")),
    "compare: mistyped": Row(
        "--compare --set layers=flux --out {tmp}/rum", ["{tmp}/rum/flux holds no run"], RESUME),
    "generate: torn config": Row(
        "", ["config.json cannot be read"], GENERATE, cut("{run}/config.json")),
    "generate: dangling": Row(
        "", ["latest says 'step_7'"], GENERATE, written("{run}/checkpoints/latest", "step_7\n")),
    "generate: torn": Row(
        "", ["step_4/__0_0.distcp has 10 bytes", ECHO_2], GENERATE, cut(of_step(4))),
    "generate: a torn step": Row(
        "--checkpoint {run}/checkpoints/step_2", ["step_2/__0_0.distcp has", "step_4 is the new"],
        GENERATE, cut(of_step(2))),
    "generate: no checkpoint": Row(
        "", ["has no checkpoint yet"], GENERATE,
        lambda places: shutil.rmtree(places["run"] / "checkpoints")),
    "generate: json nowhere": Row(
        "--json {tmp}/no/x.json", ["--json {tmp}/no/x.json cannot be written (No such"], GENERATE),
    "generate: a loop": Row(
        "--checkpoint {tmp}/loop", ["{tmp}/loop"], GENERATE,
        lambda places: (places["tmp"] / "loop").symlink_to("loop")),
    "generate: json a folder": Row("--json {tmp}", ["--json {tmp} cannot be written (a"], GENERATE),
}  # fmt: skip


def line_of(start: str, words: str, places: dict[str, Path], status: int = 2) -> str:
    """What the command says on standard error: one line."""
    line = [word.format(**places) for word in (*start.split(), *words.split())]
    if line[0] == "train":
        config_word = [] if "--config" in line else ["--config", str(DEMO)]
        line = [line[0], *config_word, *tiny_words(), *line[1:]]
    done = CliRunner().invoke(cli.app, line)
    assert done.exit_code == status, done.output
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize("name", ROWS)
def test_a_bad_input_is_one_line(name, places):
    row = ROWS[name]
    row.prepare(places)
    before = sorted(places["tmp"].rglob("*"))
    said = line_of(row.start, row.words, places)
    for part in row.said:
        assert part.format(**places) in said, said
    left = {*places["tmp"].rglob("*")} - {*before} - {places["run"] / "lock"}
    assert not left, "nothing is begun"


def test_a_bound_that_is_none(places, monkeypatch):
    monkeypatch.setenv("FLUX_MEGATRON_TIMEOUT_S", "soon")
    settings.get.cache_clear()
    said = line_of("train --out {new} --data {text}", "", places)
    assert "FLUX_MEGATRON_TIMEOUT_S='soon'" in said


def test_a_folder_that_another_run_has(places):
    with (places["run"] / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another run is writing there" in line_of(RESUME, "", places)


def refusing(number: int) -> Callable[..., object]:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.mark.parametrize(
    ("where", "name", "number", "said"),
    [
        (Path, "mkdir", errno.EROFS, "{new} cannot be written (Read-only file system)"),
        (Path, "mkdir", errno.EACCES, "{new} cannot be written (Permission denied)"),
        (run_folder, "write_json", errno.ENOSPC, "{new} cannot be written (No space left"),
    ],
)
def test_an_out_that_cannot_be_written(places, monkeypatch, where, name, number, said):
    monkeypatch.setattr(where, name, refusing(number))
    assert said.format(**places) in line_of("train --out {new} --data {text}", "", places)


def test_a_file_of_the_text_that_cannot_be_read(places, monkeypatch):
    monkeypatch.setattr(text_files, "_is_text", lambda file: file.with_name("no").open())
    said = line_of("train --out {new} --data {text}", "", places)
    assert "data.path: {text}/no cannot be read (No such file".format(**places) in said


@pytest.mark.parametrize("error", [ConfigError("bad text"), launcher.RankFailure("rank_1 failed")])
def test_a_run_that_has_done_no_step_leaves_its_folder_free(places, monkeypatch, error):
    def fails(run: object, out: Path, *_: object) -> int:
        (out / "logs").mkdir(exist_ok=True)
        raise error

    monkeypatch.setattr(launcher, "run_ranks", fails)
    words = "train --out {new} --data {text}"
    assert line_of(words, "", places, error.exit_status) == f"{error}\n"
    monkeypatch.setattr(launcher, "run_ranks", lambda *_: 0)
    other = places["tmp"] / "other"
    shutil.copytree(places["text"], other)
    done = [*words.format(**places).split()[:-1], str(other), "--config", str(DEMO), *tiny_words()]
    assert CliRunner().invoke(cli.app, done).exit_code == 0


def test_an_interrupted_run_says_how_to_go_on(places, monkeypatch):
    monkeypatch.setattr(launcher, "run_ranks", lambda *_: 130)
    monkeypatch.setattr("sys.argv", ["flux-megatron", "train", "--out", "a b"])
    assert line_of("train --out {new} --data {text}", "", places, 130) == (
        "to go on: flux-megatron train --out 'a b' --resume\n"
    )


def test_a_resumption_says_which_rows_are_lost(places, monkeypatch):
    monkeypatch.setattr(launcher, "run_ranks", lambda *_: 0)
    written("{run}/metrics.jsonl", '{"step": 1, "loss": 1.0}\n')(places)
    said = line_of(RESUME, "", places, 0)
    lacking = "metrics.jsonl lacks 3 of the 4 steps up to step_4, such as step 2: the run goes on"
    assert f"{places['run']}/{lacking}" in said


def test_nobody_looks_any_longer():
    """`train | head -1`: the run goes on. In a process of its own: rich ends the one it is in."""
    program = """
import os
from flux_megatron.lab.train.worker import _console
reader, writer = os.pipe()
console = _console(writer)
console.print("one")
assert os.read(reader, 100) == b"one\\n"
os.close(reader)
console.print("two")
"""
    environment = os.environ | {"PYTHONPATH": str(DEMO.parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_resumption_whose_losses_would_differ_is_refused(tmp_path):
    """The vocabulary is padded to rows that all ranks share: more of them are more logits."""
    sizes = TINY | {"model.heads": 6, "model.hidden": 48, "model.ffn": 96, "model.seq_length": 96}
    with run_folder.claimed(config.load(DEMO, sizes), tmp_path, resume=False):
        pass
    thirds = config.load(DEMO, sizes | {"parallel.tp": 3})
    with (
        pytest.raises(
            ConfigError, match=r"tp=3 given: .* of 384 rows, 320 expected .* parallel\.tp=2"
        ),
        run_folder.claimed(thirds, tmp_path, resume=True),
    ):
        pass


def test_without_latest_the_newest_checkpoint_counts(places):
    (places["run"] / "checkpoints" / "latest").unlink()
    assert run_folder.latest(places["run"]) == places["run"] / "checkpoints" / "step_4"


# what ranks find


@pytest.mark.parametrize(("suffix", "size"), [(".bin", 100), (".idx", 20), (".bin", 0)])
def test_torn_texts_are_named_and_built_anew(tmp_path, suffix, size):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text(WORDS)
    console = Console(file=io.StringIO())
    wanted = DataConfig(path=tmp_path / "text")
    prefix = data.indexed_dataset(wanted, tmp_path / "cache", console)
    torn = prefix.with_suffix(suffix)
    whole = torn.read_bytes()
    os.truncate(torn, size)
    assert data.indexed_dataset(wanted, tmp_path / "cache", console) == prefix
    assert torn.read_bytes() == whole
    assert f"{torn} has {size} bytes, {len(whole)} expected" in console.file.getvalue()
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [prefix.parent.name]


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "a.txt").write_text(WORDS)
    with pytest.raises(ConfigError, match=r"data\.cache: .* cannot be written \(Not a directory\)"):
        data.indexed_dataset(DataConfig(path=tmp_path), tmp_path / "a.txt", Console())


class Numbers:
    """Samples of 32 tokens, always the same."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(33) * (index + 3)) % 250
        return {
            "tokens": tokens[:-1], "labels": tokens[1:], "position_ids": torch.arange(32),
            "loss_mask": torch.ones(32),
        }  # fmt: skip


def trained(rank: int, out: Path, overrides: dict, steps: int, resume: bool) -> list[float]:
    """The losses of `steps` steps; a checkpoint of the second one is written, or read before."""
    pretend_cuda()
    wanted = config.load(DEMO, TINY | overrides | {"parallel.tp": dist.get_world_size()})
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    cpu = torch.device("cpu")
    worker._seed(wanted.train.seed)
    with layer_context(wanted):
        training = loop.Loop(wanted, out, Trainee(wanted, cpu), Numbers(), cpu)
        if resume:
            found = run_folder.latest(out)
            training.step, training.consumed = checkpoint.load(found, training.trainee)
        batches = data.microbatches(Numbers(), wanted, 0, 1, training.consumed, cpu)
        losses = []
        for _ in range(steps):
            losses.append(training._one_step(batches)["loss"])
            if training.step == 2 and not resume:
                checkpoint.save(out, training.trainee, 2, training.consumed)
    return losses


@pytest.mark.parametrize(
    ("overrides", "sizes"),
    [
        ({}, (1, 4)),
        ({"model.swiglu": True, "model.bias": True, "model.tied_embeddings": False}, (1,)),
    ],
    ids=["plain", "swiglu"],
)
def test_a_checkpoint_of_two_ranks_resumes_on_others(tmp_path, overrides, sizes):
    straight, _ = run_ranks(trained, 2, tmp_path, overrides, 4, False)
    assert len({*straight}) == 4
    for ranks in sizes:
        for losses in run_ranks(trained, ranks, tmp_path, overrides, 2, True):
            assert losses == pytest.approx(straight[2:], abs=1e-5, rel=0)


def full_disk(rank: int) -> None:
    """No room for the third row of metrics.jsonl."""
    append, rows = run_folder.append_metrics, []

    def appended(out: Path, row: dict) -> None:
        rows.append(row)
        refusing(errno.ENOSPC)() if len(rows) > 2 else append(out, row)

    run_folder.append_metrics = appended


RUNS = {
    "a full disk": (
        full_disk, [],
        ["rank_0 failed: RunFolderError: {out} could not be written (No space left", "--resume"],
    ),
    "no finite loss": (
        lambda rank: None,
        ["--set", "train.lr=1e30", "--set", "train.warmup_steps=0", "--set", "train.clip=0"],
        ["LossNotFinite: step 2: loss 5.", "gradient norm nan", "(lr 9.99", "step_1 is kept"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_fails_ends_in_one_line(tmp_path, name):
    plant, words, said = RUNS[name]
    import_what_ranks_import()
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text(WORDS)
    out = tmp_path / "out"
    line = ["train", "--config", str(DEMO), "--out", str(out), "--data", str(tmp_path / "text")]
    line += [*tiny_words(), "--steps", "8", "--set", "train.save_every=1", *words]
    code, output, left = kept(command_line, line, plant, tmp_path / "output")
    assert (code, left) == (1, []), output
    last = output.splitlines()[-1]
    for part in said:
        assert part.format(out=out) in last, output
    assert "Traceback" not in output
    assert run_folder.latest(out) is not None

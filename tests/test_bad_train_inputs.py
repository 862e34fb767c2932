"""Bad inputs of `flux-megatron train` and `generate`: one line each, that names what is wrong and
the way out, before any rank starts. Two faults that only ranks can find follow.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="needs the extra `train`")

import torch
import torch.distributed.checkpoint as dcp
from forked_processes import command_line, import_what_ranks_import, kept
from typer.testing import CliRunner

from flux_megatron import cli, settings
from flux_megatron.lab.train import config, launcher, run_folder, text_files
from flux_megatron.lab.train.config import ConfigError

DEMO = Path(__file__).parent.parent / "configs" / "train" / "demo.yaml"
TINY = {
    "model.num_layers": 1, "model.hidden": 32, "model.heads": 4, "model.ffn": 64,
    "model.seq_length": 32, "train.micro_batch": 1, "train.global_batch": 2,
    "train.warmup_steps": 1, "train.save_every": None, "train.log_every": 1,
    "parallel.device": "cpu", "layers": "stock",
}  # fmt: skip
WORDS = " ".join(f"{i} is {i * i}." for i in range(3000))
Places = dict[str, Path]
Prepare = Callable[[Places, pytest.MonkeyPatch], object]  # breaks something before the command


@pytest.fixture
def places(tmp_path, monkeypatch) -> Iterator[Places]:
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


def written(file: str, content: str | bytes) -> Prepare:
    def prepare(places: Places, patch: object) -> None:
        path = Path(file.format(**places))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return prepare


def cut(*files: str) -> Prepare:
    return lambda places, patch: [os.truncate(file.format(**places), 10) for file in files]


def loop(places: Places, patch: object) -> None:
    (places["tmp"] / "loop").symlink_to("loop")


def locked(places: Places, patch: object) -> object:
    lock = (places["run"] / "lock").open("a")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock  # it is held as long as this is


def never(places: Places, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("FLUX_MEGATRON_TIMEOUT_S", "soon")
    settings.get.cache_clear()


def unreadable(places: Places, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(text_files, "_is_text", lambda file: file.with_name("no").open())


def refusing(number: int) -> Callable[..., object]:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


def no_folder(number: int) -> Prepare:
    return lambda places, patch: patch.setattr(Path, "mkdir", refusing(number))


B, X, LATEST, METRICS = "{tmp}/b", "{tmp}/c/x", "{run}/checkpoints/latest", "{run}/metrics.jsonl"
STEP_2, STEP_4 = "{run}/checkpoints/step_2/", "{run}/checkpoints/step_4/"
SHARD = "__0_0.distcp"
ECHO_2 = "step_2 is the newest whole one: echo step_2 > {run}/checkpoints/latest"
# By what a command begins with: what follows, what is broken before, and what is in the line.
ROWS: dict[str, list[tuple[str | Prepare, ...]]] = {
    "train --out {new} --data {text}": [
        ("--config {tmp}/no.yaml", "no.yaml: No such file"),
        ("--config {tmp}", "--config {tmp}: Is a directory"),
        ("--config {tmp}/b", written(B, b"\xff\x00\xfe"), "--config {tmp}/b: not a text file"),
        ("--config {tmp}/b", written(B, "a: [1\nb: 2\n"), "{tmp}/b: not YAML"),
        ("--config {tmp}/b", written(B, "- 1\n"), "a mapping expected, list given"),
        ("--config {tmp}/b", written(B, "a: 1\na: 2\n"), "given twice: a"),
        ("--config {tmp}/b", written(B, ""), "{tmp}/b: train.steps: Field required", "train.lr"),
        ("--set train.lr=[1", "--set: train.lr: not YAML: '[1'"),
        ("--set train.lr=2026-99-99", "--set: train.lr: not YAML: '2026-99-99'"),
        ("--set train.lr", "'train.lr' given, key=value expected, such as train.lr=0.001"),
        ("--set =3", "'=3' given, key=value expected"),
        ("--set train.lr=abc", "train.lr: ", "valid number", "'abc' given by"),
        ("--set train.steps=1e9x", "train.steps: ", "'1e9x' given by --set"),
        ("--set train.log_every=true", "valid integer, True given by --set"),
        ("--set train.log_every='3'", "valid integer, '3' given by --set"),
        ("--set train.steps=1000000000000000000000", "train.steps: ", "2147483647"),
        ("--set train.lr=.inf", "train.lr: ", "finite", "inf given by --set"),
        ("--set train.lr=.nan", "train.lr: ", "nan given by --set"),
        ("--set train.lr=-1", "train.lr: ", "greater than 0, -1 given by --set"),
        ("--set train.min_lr=1", "min_lr=1.0 must not be above train.lr=0.001"),
        ("--set model.hiden=64", "demo.yaml: model.hiden: unknown key", "model.hidden exp"),
        ("--set model=3", "model: ", "3 given by --set"),
        ("--set model.hidden.x=3", "'hidden' is not a section"),
        ("--set model.hidden=0", "model.hidden: ", "0 given by --set"),
        ("--set model.hidden=12.5", "model.hidden: ", "12.5 given by --set"),
        ("--set model.heads=7", "hidden=32 must be divisible by model.heads=7"),
        ("--set train.seed=4294967296", "train.seed: ", "4294967295, 4294967296"),
        ("--set train.dtype=fp8", "train.dtype: ", "'bfloat16'", "'fp8' given"),
        ("--set layers=fluks", "layers: ", "'flux', 'stock'", "'fluks' given"),
        ("--set strategy=magic", "strategy: ", "'fused'", "'magic' given"),
        ("--set train.micro_batch=3", "global_batch=2 must be divisible by train.micro_batch=3"),
        ("--set train.warmup_steps=100", "warmup_steps=100 must be below train.decay_steps=100"),
        ("--set parallel.device=tpu", "parallel.device: ", "'tpu' given by --set"),
        ("--set parallel.device=cuda", "2 ranks need as many GPUs, found 0"),
        ("--set parallel.world_size=3", "world_size=3 must be divisible by"),
        ("--set parallel.world_size=4000", "4000 ranks given, at most 64"),
        ("--tp 0", "parallel.tp: ", "greater than 0, 0 given by --tp"),
        ("--tp 3", "model.heads=4 must be divisible by parallel.tp=3"),
        ("--steps 0", "train.steps: ", "0 given by --steps"),
        ("--steps ten", "'--steps'", "'ten'"),
        ("--data {tmp}/no", "data.path: {tmp}/no is not a folder"),
        ("--data {text}/words.txt", "words.txt is not a folder"),
        ("--data {tmp}/c", lambda places, patch: (places["tmp"] / "c").mkdir(),
         "no text file in {tmp}/c matches '*'"),
        ("--data {tmp}/c", written(X, b"\0\0"), "no text file in {tmp}/c"),
        ("--data {tmp}/c", written(X, b"abc"), "4 tokens in {tmp}/c, 33 or more expected",
         "model.seq_length=32"),
        ("--data {tmp}/loop", loop, "data.path: {tmp}/loop is not a folder"),
        ("--set data.pattern=a*.rst", "no text file in {text} matches 'a*.rst'"),
        ("--set data.pattern=/x", "data.pattern: '/x' given, a pattern such as"),
        ("", unreadable, "data.path: {text}/no cannot be read (No such file"),
        ("--out {tmp}/b", written(B, ""), "--out {tmp}/b: ",
         "(Not a directory): a folder with room expected"),
        ("--out {tmp}/b/c", written(B, ""), "--out {tmp}/b/c: ",
         "cannot be written (Not a directory)"),
        ("--out /proc/run", "--out /proc/run: /proc/run cannot be written"),
        ("--out {tmp}/loop", loop, "--out {tmp}/loop: ", "Too many levels of symbolic links"),
        ("--out {tmp}/" + 300 * "a", "File name too long"),
        ("--out {run}", "{run} is not empty: give another --out, or --resume"),
        ("", no_folder(errno.EROFS), "{new} cannot be written (Read-only file system)"),
        ("", no_folder(errno.EACCES), "{new} cannot be written (Permission denied)"),
        ("", never, "FLUX_MEGATRON_TIMEOUT_S='soon'"),
    ],
    "train --out {run} --data {text} --resume": [
        ("--out {tmp}/rum", "--resume: {tmp}/rum holds no run"),
        ("--out {text}", "{text} holds no run (no config.json)"),
        ("--compare --set layers=flux --out {tmp}/rum", "{tmp}/rum/flux holds no run"),
        ("", cut("{run}/config.json"), "{run}/config.json cannot be read (Invalid JSON"),
        ("", written("{run}/config.json", b"\xff\0"), "{run}/config.json cannot be read"),
        ("--set model.ffn=128", "cannot be resumed with other settings: model.ffn: 64 -> 128"),
        ("--data {tmp}/c", written(X, WORDS), "data.path: {text} -> {tmp}/c"),
        ("--tp 3", "model.heads=4 must be divisible by parallel.tp=3"),
        ("", written(LATEST, "step_7\n"), "latest says 'step_7', expected one of ['step_2', ",
         "'step_4']; echo step_4 > {run}"),
        ("", written(LATEST, ""), "latest says '', expected one of"),
        ("", cut(STEP_4 + SHARD), STEP_4 + SHARD + " has 10 bytes, ", ECHO_2),
        ("", lambda places, patch: Path((STEP_4 + SHARD).format(**places)).unlink(),
         STEP_4 + SHARD + " has 0 bytes, ", ECHO_2),
        ("", cut(STEP_4 + ".metadata"), STEP_4 + ".metadata cannot be read", ECHO_2),
        ("", cut(STEP_4 + "common.pt"), STEP_4 + "common.pt is missing or torn", ECHO_2),
        ("", cut(STEP_2 + SHARD, STEP_4 + SHARD), "has no other whole one: train anew"),
        ("", written(METRICS, b'{"step": 1}\n{"st\xff\n{"step": 3}\n'),
         METRICS + ": line 2 is no row", "remove it"),
        ("", written(METRICS, "3\n"), METRICS + ": line 1 is no row"),
        ("", locked, "another run is writing there"),
    ],
    "generate --checkpoint {run} --prompt a --tokens 4": [
        ("", cut("{run}/config.json"), "config.json cannot be read"),
        ("", written(LATEST, "step_7\n"), "latest says 'step_7'"),
        ("", cut(STEP_4 + SHARD), STEP_4 + SHARD + " has 10 bytes", ECHO_2),
        ("--checkpoint " + STEP_2, cut(STEP_2 + SHARD), STEP_2 + SHARD + " has", "4 is the new"),
        ("", lambda places, patch: shutil.rmtree(places["run"] / "checkpoints"),
         "has no checkpoint yet"),
        ("--json {tmp}/no/x.json", "--json {tmp}/no/x.json cannot be written (No such"),
        ("--checkpoint {tmp}/loop", loop, "{tmp}/loop"),
        ("--json {tmp}", "--json {tmp} cannot be written (a"),
    ],
}  # fmt: skip
CASES = [(start, row) for start, rows in ROWS.items() for row in rows]


def line_of(start: str, words: str, places: Places, status: int = 2) -> str:
    """What the command says on standard error: one line."""
    line = [word.format(**places) for word in (*start.split(), *words.split())]
    if line[0] == "train":
        config_word = [] if "--config" in line else ["--config", str(DEMO)]
        line = [line[0], *config_word, *tiny_words(), *line[1:]]
    done = CliRunner().invoke(cli.app, line)
    assert done.exit_code == status, done.output
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def tiny_words() -> list[str]:
    values = {key: "null" if value is None else value for key, value in TINY.items()}
    return [part for key, value in values.items() for part in ("--set", f"{key}={value}")]


@pytest.mark.parametrize(
    ("start", "row"), CASES, ids=[f"{start.split()[0]}: {row[0]} {row[-1]}" for start, row in CASES]
)
def test_a_bad_input_is_one_line(start, row, places, monkeypatch):
    words, *parts = row
    held = [part(places, monkeypatch) for part in parts if callable(part)]
    before = sorted(places["tmp"].rglob("*"))
    said = line_of(start, words, places)
    for part in parts:
        assert callable(part) or part.format(**places) in said, said
    left = {*places["tmp"].rglob("*")} - {*before} - {places["run"] / "lock"}
    assert not left, "nothing is begun"
    del held


def test_an_out_without_room_for_a_file(places, monkeypatch):
    monkeypatch.setattr(run_folder, "write_json", refusing(errno.ENOSPC))
    said = line_of("train --out {new} --data {text}", "", places)
    assert "{new} cannot be written (No space left".format(**places) in said


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
    said = line_of("train --out {new} --data {text}", "", places, 130)
    assert said == "to go on: flux-megatron train --out 'a b' --resume\n"


def test_a_resumption_says_which_rows_are_lost(places, monkeypatch):
    monkeypatch.setattr(launcher, "run_ranks", lambda *_: 0)
    written(METRICS, '{"step": 1, "loss": 1.0}\n')(places, monkeypatch)
    said = line_of("train --out {run} --data {text} --resume", "", places, 0)
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
    rule = r"tp=3 given: .* of 384 rows, 320 expected .* parallel\.tp=2"
    with (
        pytest.raises(ConfigError, match=rule),
        run_folder.claimed(thirds, tmp_path, resume=True),
    ):
        pass


def test_without_latest_the_newest_checkpoint_counts(places):
    Path(LATEST.format(**places)).unlink()
    assert run_folder.latest(places["run"]) == places["run"] / "checkpoints" / "step_4"


def full_disk(rank: int) -> None:
    """No room for the third row of metrics.jsonl."""
    append, rows = run_folder.append_metrics, []

    def appended(out: Path, row: dict) -> None:
        rows.append(row)
        refusing(errno.ENOSPC)() if len(rows) > 2 else append(out, row)

    run_folder.append_metrics = appended


ENDLESS = ["--set", "train.lr=1e30", "--set", "train.warmup_steps=0", "--set", "train.clip=0"]
RUNS = {
    "a full disk": (
        full_disk, [],
        ["rank_0 failed: RunFolderError: {out} could not be written (No space left", "--resume"],
    ),
    "no finite loss": (
        lambda rank: None, ENDLESS,
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

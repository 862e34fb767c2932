"""Bad inputs of `flux-megatron train` and `generate`: one line each, that names what was given and
what is expected, before any rank starts.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="needs the extra `train`")

from train_words import WORDS, load, words
from typer.testing import CliRunner

from flux_megatron import cli, settings
from flux_megatron.lab.train import ranks, run_folder

Places = dict[str, Path]
Prepare = Callable[[Places, pytest.MonkeyPatch], object]  # breaks something before the command


@pytest.fixture
def places(tmp_path, monkeypatch) -> Places:
    """What rows call {text}, {run} (two checkpoints, four steps), {new} and {tmp}."""
    text, run = tmp_path / "text", tmp_path / "run"
    words(run, text)
    for step in (2, 4):
        (run / "checkpoints" / f"step_{step}").mkdir(parents=True)
        (run / "checkpoints" / f"step_{step}" / "metadata.json").touch()
    (run / "checkpoints" / "latest").write_text("step_4\n")
    (run / "config.json").write_text(load(data__path=str(text)).model_dump_json())
    for step in (1, 2, 3, 4):
        run_folder.append_metrics(run, {"step": step, "loss": 1.0})
    monkeypatch.setattr(ranks, "gpu_count", lambda: 0)
    monkeypatch.setattr(ranks, "launch", lambda *_: pytest.fail("ranks were started"))
    return {"tmp": tmp_path, "text": text, "run": run, "new": tmp_path / "new"}


def written(file: str, content: str | bytes) -> Prepare:
    def prepare(places: Places, patch: object) -> None:
        path = Path(file.format(**places))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return prepare


def never(places: Places, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("FLUX_MEGATRON_TIMEOUT_S", "soon")
    settings.get.cache_clear()


def no_checkpoint(places: Places, patch: object) -> None:
    shutil.rmtree(places["run"] / "checkpoints")


B, X, LATEST = "{tmp}/b", "{tmp}/c/x", "{run}/checkpoints/latest"
# By what a command begins with: what follows, what is broken before, and what is in the line.
ROWS: dict[str, list[tuple[str | Prepare, ...]]] = {
    "train --out {new} --data {text}": [
        ("--config {tmp}/no.yaml", "no.yaml: No such file", "a YAML file, demo or h200 expected"),
        ("--config {tmp}/b", written(B, b"\xff\x00\xfe"), "--config {tmp}/b: not a text file"),
        ("--config {tmp}/b", written(B, "- 1\n"), "a mapping expected, list given"),
        ("--config {tmp}/b", written(B, "a: 1\na: 2\n"), "given twice: a"),
        ("--config {tmp}/b", written(B, ""), "{tmp}/b: model: missing; train: missing"),
        ("--set train.lr=[1", "--set: train.lr: not YAML: '[1'"),
        ("--set train.lr", "'train.lr' given, key=value expected, such as train.lr=0.001"),
        ("--set train.lr=abc", "train.lr: ", "valid number, 'abc' given"),
        ("--set train.log_every=true", "valid integer, True given"),
        ("--set train.steps=1000000000000000000000", "train.steps: ", "2147483647"),
        ("--set train.lr=.inf", "train.lr: ", "finite number, inf given"),
        ("--set train.lr=-1", "train.lr: ", "greater than 0, -1 given"),
        ("--set train.min_lr=1", "min_lr=1.0 must not be above train.lr=0.001"),
        ("--set model.hiden=64", "demo.yaml: model.hiden: ", "64 given"),
        ("--set model=3", "model: ", "3 given"),
        ("--set model.hidden.x=3", "model.hidden: ", "a valid integer"),
        ("--set model.heads=7", "hidden=32 must be divisible by model.heads=7"),
        ("--set train.seed=4294967296", "train.seed: ", "4294967296 given"),
        ("--set train.dtype=fp8", "train.dtype: ", "'bfloat16'", "'fp8' given"),
        ("--set layers=fluks", "layers: ", "'flux', 'stock'", "'fluks' given"),
        ("--set strategy=magic", "strategy: ", "'fused'", "'magic' given"),
        ("--set train.micro_batch=3", "global_batch=2 must be divisible by train.micro_batch=3"),
        ("--set train.warmup_steps=100", "warmup_steps=100 must be below train.decay_steps=100"),
        ("--set parallel.device=cuda", "2 ranks need as many GPUs, found 0"),
        ("--set parallel.world_size=3", "world_size=3 must be divisible by"),
        ("--set parallel.world_size=6", "6 ranks, ", "global_batch=2 given", "= 3 expected"),
        ("--tp 0", "parallel.tp: ", "greater than 0, 0 given"),
        ("--tp 3 --set model.heads=3 --set model.hidden=33 --set model.ffn=66"
         " --set model.seq_length=33", "parallel.tp=3 must divide the 320 rows"),
        ("--data {tmp}/no", "data.path: {tmp}/no given, a folder of text files expected"),
        ("--data {tmp}/c", written(X, b"\0\0"), "0 tokens of text in {tmp}/c, more than"),
        ("--data {tmp}/c", written(X, b"abc"), "4 tokens of text in {tmp}/c", "seq_length=32 exp"),
        ("--out {tmp}/b", written(B, ""), "--out {tmp}/b: ", "a folder that can be written"),
        ("--out /proc/run", "--out /proc/run: ", "a folder that can be written expected"),
        ("--out {run}", "{run} is not empty: give another --out, or --resume"),
        ("--compare --set layers=stock", "layers=stock given, flux expected"),
        ("--compare --set train.dtype=bfloat16", "bfloat16 with parallel.tp=2 given, 3 or more"),
        ("", never, "FLUX_MEGATRON_TIMEOUT_S='soon'"),
    ],
    "train --out {run} --data {text} --resume": [
        ("--out {tmp}/rum", "--resume {tmp}/rum given, the folder of a run expected"),
        ("--compare --out {tmp}/rum", "--resume {tmp}/rum/flux given"),
        ("", written("{run}/config.json", b"\xff\0"), "{run}/config.json cannot be read"),
        ("--set model.ffn=128", "cannot be resumed with other settings: model.ffn: 64 -> 128"),
        ("--data {tmp}/c", written(X, WORDS), "data.path: {text} -> {tmp}/c"),
        ("", written(LATEST, "step_7\n"), "names step_7, one of step_2, step_4 expected"),
        ("", written(LATEST, ""), "names nothing, one of"),
    ],
    "generate --checkpoint {run} --prompt 12 --tokens 4": [
        ("--checkpoint {tmp}", "--checkpoint {tmp} given, the folder of a run expected"),
        ("--checkpoint {run}/checkpoints/step_7", "step_7 given, but there is no checkpoint"),
        ("", no_checkpoint, "{run} given, but there is no checkpoint (yet)"),
        ("", written(LATEST, "step_7\n"), "names step_7, one of"),
        ("--tokens 31", "prompt of 2 tokens and --tokens 31 given, 32 together at most"),
        ("--tokens 0", "'--tokens': ", "greater than or equal to 1"),
        ("--tp 3", "--tp 3", "model.heads=4 must be divisible by parallel.tp=3"),
        ("--prompt a\udcff", "--prompt is no text", "position 1"),
        (64 * "--prompt a ", "65 prompts given, at most 64 expected"),
        ("--json {tmp}", "--json {tmp}: ", "a file that can be written expected"),
    ],
}  # fmt: skip
CASES = [(start, row) for start, rows in ROWS.items() for row in rows]
NAMES = [ascii(f"{start.split()[0]}: {row[0][:60]} {row[-1]}") for start, row in CASES]


@pytest.mark.parametrize(("start", "row"), CASES, ids=NAMES)
def test_a_bad_input_is_one_line(start, row, places, monkeypatch):
    more, *parts = row
    for prepare in filter(callable, parts):
        prepare(places, monkeypatch)
    line = [word.format(**places) for word in (*start.split(), *more.split())]
    if line[0] == "train":
        tiny = words(places["new"], places["text"])
        line = [*(tiny if "--config" not in line else ["train"]), *line[1:]]
    done = CliRunner().invoke(cli.app, line)
    assert done.exit_code == 2, done.output
    assert done.stderr.count("\n") == 1, done.stderr
    for part in parts:
        assert callable(part) or part.format(**places) in done.stderr, done.stderr
    assert not places["new"].exists(), "nothing is begun"
    settings.get.cache_clear()

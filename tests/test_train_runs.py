"""Whole runs of `flux-megatron train`: processes, signals, files, codes.

Some are started as a user starts them, the others forked from this process, which saves each of
their processes its imports.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="needs the extra `train`")

import torch
from checkpoint_tensors import tensors
from forked_processes import ROOT, command_line, import_what_ranks_import, kept

TINY = {
    "model.num_layers": 1, "model.hidden": 32, "model.heads": 4, "model.ffn": 64,
    "model.seq_length": 32, "train.micro_batch": 1, "train.global_batch": 2,
    "train.warmup_steps": 1, "train.save_every": "null", "train.log_every": 1,
    "parallel.device": "cpu",
}  # fmt: skip
INTERRUPTED = 130


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "words.txt").write_text(" ".join(f"{i} is {i * i}." for i in range(3000)))
    return folder


def command(out: Path, text: Path, *arguments: str, **settings: object) -> list[str]:
    line = [sys.executable, "-m", "flux_megatron.cli", "train"]
    line += ["--config", "configs/train/demo.yaml"]
    line += ["--out", str(out), "--data", str(text), *arguments]
    settings = TINY | {key.replace("__", "."): value for key, value in settings.items()}
    return line + [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]


def train(out: Path, text: Path, *arguments: str, expected: int = 0, env=None, **settings) -> str:
    """Run to the end as a user does; standard output and error."""
    done = subprocess.run(
        command(out, text, *arguments, **settings),
        cwd=ROOT, env=os.environ | (env or {}), capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == expected, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert_no_rank_of(out)
    return done.stdout + done.stderr


def train_forked(
    out: Path, text: Path, *arguments: str, expected: int = 0, plant=lambda rank: None, **settings
) -> str:
    """The same, in forked processes: what `command` says, by the same code. `plant(rank)` runs in
    each rank before that.
    """
    import_what_ranks_import()
    words = command(out, text, *arguments, **settings)[3:]
    code, output, left = kept(command_line, words, plant, out.with_suffix(".output"))
    assert (code, left) == (expected, []), (
        f"exit code {code}, processes left behind: {left}\n{output}"
    )
    return output


def assert_no_rank_of(out: Path) -> None:
    left = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended while we looked
            if (
                f"flux_megatron.lab.train.worker\0{out}\0".encode()
                in (process / "cmdline").read_bytes()
            ):
                left.append(process.name)
    assert not left, f"processes left behind: {left}"


def losses(out: Path) -> list[float]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


def test_resuming_changes_no_bit(tmp_path, text):
    """Six steps at once, and three and three: the same losses, weights and moments."""
    straight, halves = tmp_path / "straight", tmp_path / "halves"
    output = train_forked(straight, text, "--steps", "6", train__save_every=4)
    assert re.search(r"flux step 6/6 +loss [0-9.]+ .* tokens/s", output)
    train_forked(halves, text, "--steps", "3")
    train_forked(halves, text, "--steps", "6", "--resume")

    assert losses(halves) == losses(straight)
    assert losses(straight)[-1] < losses(straight)[0]
    whole, resumed = (tensors(out / "checkpoints" / "step_6") for out in (straight, halves))
    assert whole.keys() == resumed.keys()
    assert any("exp_avg" in key for key in whole)
    for key, tensor in whole.items():
        assert torch.equal(tensor, resumed[key]), key
    earlier = tensors(straight / "checkpoints" / "step_4")
    assert not all(torch.equal(tensor, earlier[key]) for key, tensor in whole.items())
    assert (straight / "checkpoints" / "latest").read_text() == "step_6\n"
    assert (straight / "loss.png").stat().st_size > 1000


def test_our_layers_train_and_overlap_every_call(tmp_path, text):
    out = tmp_path / "run"
    output = train(out, text, "--steps", "2")
    summary = json.loads((out / "summary.json").read_text())
    ranks, microbatches, steps = 2, 2, 2
    assert summary["eligible"] == (8 * 1 + 2) * ranks * microbatches * steps
    assert summary["overlapped"] == summary["eligible"], summary
    assert summary["silent"] == 0
    assert not summary["fallbacks"]
    assert "silent fallbacks" in output
    assert "is not empty" in train(out, text, expected=2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_leaves_a_checkpoint_and_no_process(tmp_path, text, number):
    out = tmp_path / "run"
    process = start(out, text, "--steps", "100000", layers="stock")
    process.send_signal(number)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == INTERRUPTED, output
    assert f"to go on: flux-megatron train --config configs/train/demo.yaml --out {out} " in output
    assert_no_rank_of(out)
    done = len(losses(out))
    assert (out / "checkpoints" / "latest").read_text() == f"step_{done}\n"
    assert tensors(out / "checkpoints" / f"step_{done}")
    if number is signal.SIGINT:
        train_forked(out, text, "--steps", str(done + 1), "--resume", layers="stock")
        assert len(losses(out)) == done + 1


def test_compare_agrees_and_can_disagree(tmp_path, text):
    arguments = ("--steps", "2", "--compare")
    output = train(tmp_path / "same", text, *arguments)  # as a user starts it
    assert re.search(r"verdict +│ same", output)
    result = json.loads((tmp_path / "same" / "compare.json").read_text())
    assert result["overlapped"] == result["eligible"] > 0
    assert (tmp_path / "same" / "compare.png").stat().st_size > 1000

    other = tmp_path / "other"
    output = train_forked(other, text, *arguments, expected=1, plant=_one_percent_more)
    assert re.search(r"verdict +│ DIFFERENT", output)


def _one_percent_more(rank: int) -> None:
    from flux_megatron.integration.layers import FluxRowParallelLinear

    forward = FluxRowParallelLinear.forward

    def wrong(self, *arguments):
        y, bias = forward(self, *arguments)
        return y * 1.01, bias

    FluxRowParallelLinear.forward = wrong


def start(out: Path, text: Path, *arguments: str, **settings) -> subprocess.Popen[str]:
    """A run that has done its first steps."""
    process = subprocess.Popen(
        command(out, text, *arguments, **settings),
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 100
    while not (out / "metrics.jsonl").exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "no step in 100 s"
        time.sleep(0.1)
    return process

"""Whole runs of `flux-megatron train`: processes, signals, files, codes. One is started as a user
starts it, the others are forked from this process.
"""

import itertools
import json
import os
import re
import resource
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from checkpoint_tensors import tensors
from forked_command import ROOT, Command, flux_megatron, wait_for
from started import python
from train_words import words

from flux_megatron.integration import layers

INTERRUPTED = 130

BOUND = {"FLUX_MEGATRON_TIMEOUT_S": "4", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2"}


def losses(out: Path) -> list[float]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


def train(tmp_path: Path, out: Path, *more: object, settings=None, **options) -> str:
    given = words(out, tmp_path / "text", *more, **(settings or {}))
    return flux_megatron(tmp_path / "forked", *given, **options)


def assert_same_bits(out: Path, other: Path, step: int) -> None:
    ours, its = (tensors(one / "checkpoints" / f"step_{step}") for one in (out, other))
    assert ours.keys() == its.keys()
    assert any("exp_avg" in key for key in ours)
    for key, tensor in ours.items():
        assert torch.equal(tensor, its[key]), key


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    output = train(folder, folder / "run", "--steps", 6, settings={"train__save_every": 4})
    assert re.search(r"flux step 6/6 +loss [0-9.]+ .* tokens/s", output)
    return folder / "run"


def test_our_layers_train_and_overlap_every_call(straight):
    summary = json.loads((straight / "summary.json").read_text())
    ranks, microbatches, steps = 2, 2, 6
    assert summary["eligible"] == (8 * 1 + 2) * ranks * microbatches * steps
    assert summary["overlapped"] == summary["eligible"], summary
    assert (summary["silent"], summary["fallbacks"]) == (0, {})
    assert losses(straight)[-1] < losses(straight)[0]
    assert (straight / "loss.png").stat().st_size > 1000
    assert (straight / "checkpoints" / "latest").read_text() == "step_6\n"
    earlier, last = (tensors(straight / "checkpoints" / f"step_{step}") for step in (4, 6))
    assert not all(torch.equal(tensor, earlier[key]) for key, tensor in last.items())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_leaves_a_checkpoint_and_no_process(tmp_path, number):
    out = tmp_path / "run"
    given = words(out, tmp_path / "text", "--steps", 100000, layers="stock")
    command = Command(given, tmp_path / "forked")
    wait_for((out / "metrics.jsonl").exists, command)
    os.kill(command.pid, number)
    assert command.ends() == INTERRUPTED, command.output
    assert f"to go on: flux-megatron train --config {given[2]} --out {out} " in command.output
    done = len(losses(out))
    assert (out / "checkpoints" / "latest").read_text() == f"step_{done}\n"
    train(tmp_path, out, "--steps", done + 1, "--resume", settings={"layers": "stock"})
    assert len(losses(out)) == done + 1


def one_percent_more(rank: int) -> None:
    forward = layers.FluxRowParallelLinear.forward

    def wrong(self, *arguments):
        y, bias = forward(self, *arguments)
        return y * 1.01, bias

    layers.FluxRowParallelLinear.forward = wrong


as_a_user = partial(python, "-m", folder=ROOT, limit_s=200, TRITON_INTERPRET=None)


def test_compare_agrees_and_can_disagree(tmp_path):
    """Also under torchrun, with its own words."""
    same, other = tmp_path / "same", tmp_path / "other"
    given = words(same, tmp_path / "text", "--steps", 2, "--compare")
    line = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "flux_megatron"]
    assert "verdict: same" in as_a_user(*line, *given).stdout
    result = json.loads((same / "compare.json").read_text())
    assert result["overlapped"] == result["eligible"] > 0
    assert (same / "compare.png").stat().st_size > 1000
    more = ("--steps", 2, "--compare")
    assert "verdict: DIFFERENT" in train(tmp_path, other, *more, expected=1, plant=one_percent_more)
    assert losses(other / "stock") == losses(same / "stock")


def test_a_user_starts_it_and_a_spoiled_run_ends_in_one_line(tmp_path):
    given = words(
        tmp_path / "run", tmp_path / "text", "--steps", 8, train__lr=1e30, train__warmup_steps=0,
        train__clip=0, train__save_every=1,
    )  # fmt: skip
    (line,) = as_a_user("flux_megatron", *given, code=1).stderr.splitlines()
    assert "NaN in local grad norm" in line
    assert f"(more in {tmp_path / 'run' / 'logs'})" in line
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == "step_1\n"


def failing(rank: int) -> None:
    """On rank 1, the third forward of a row layer fails."""
    forward, calls = layers.FluxRowParallelLinear.forward, itertools.count(1)

    def planted(self, x):
        if rank == 1 and next(calls) == 3:
            raise OSError("planted")
        return forward(self, x)

    layers.FluxRowParallelLinear.forward = planted


def poor(rank: int) -> None:
    """On rank 1, shared memory is full."""
    allocate = os.posix_fallocate

    def refused(descriptor: int, offset: int, size: int) -> None:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, hard))
        allocate(descriptor, offset, size)

    if rank == 1:
        os.posix_fallocate = refused


FULL = "shared memory: .*too large"
FAULTS = {
    "an exception": (failing, "rank 1 failed: OSError: planted"),
    "full memory": (poor, rf"rank \d failed: WorkspaceError: .*rank 1: \d+ bytes of {FULL}"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_one_rank_ends_the_run_by_name(tmp_path, fault):
    plant, said = FAULTS[fault]
    started, out = time.monotonic(), tmp_path / "run"
    options = {"settings": {"strategy": "pipelined"}, "environment": BOUND, "expected": 1}
    output = train(tmp_path, out, plant=plant, **options)
    assert re.search(said, output.splitlines()[-1]), output
    assert time.monotonic() - started < 40


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_a_rank_that_is_gone_ends_the_run(tmp_path, number):
    out = tmp_path / "run"
    given = words(out, tmp_path / "text", "--steps", 100000)
    command = Command(given, tmp_path / "forked", environment=BOUND)
    wait_for((out / "metrics.jsonl").exists, command)
    os.kill(command.rank(1), number)
    assert command.ends(60) == 1
    said = r"rank 1 failed: Signal 9 \(SIGKILL\)" if number == signal.SIGKILL else "rank 0 failed: "
    assert re.match(said, command.output.splitlines()[-1]), command.output


def slow_disk(rank: int) -> None:
    """Processes that write a checkpoint's files are still at it when their rank is killed."""
    os.fsync = lambda file: time.sleep(0.3)


@pytest.mark.parametrize("victim", ["launcher", "rank"])
def test_a_kill_while_a_checkpoint_is_written_loses_no_bit(tmp_path, straight, victim):
    out = tmp_path / "run"
    given = words(out, tmp_path / "text", "--steps", 6, train__save_every=1)
    command = Command(given, tmp_path / "forked", slow_disk, BOUND)
    wait_for(lambda: any((out / "checkpoints" / "step_3").glob("*.distcp")), command)
    os.kill(command.pid if victim == "launcher" else command.rank(0), signal.SIGKILL)
    assert command.ends() == (-signal.SIGKILL if victim == "launcher" else 1), command.output
    train(tmp_path, out, "--steps", 6, "--resume", settings={"train__save_every": 1})
    assert losses(out) == losses(straight)
    assert_same_bits(out, straight, 6)

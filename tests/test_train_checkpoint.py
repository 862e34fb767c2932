"""What a checkpoint holds besides tensors, in which order it becomes the newest one, and on which
ranks a run goes on from it.
"""

from __future__ import annotations

import multiprocessing
import random
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

pytest.importorskip("megatron.core", reason="needs the extra `train`")

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from ranks import on_cpu_ranks, run_ranks
from test_bad_train_inputs import DEMO, TINY

from flux_megatron.integration.cpu_device import pretend_cuda
from flux_megatron.lab.train import checkpoint, config, data, loop, run_folder, worker
from flux_megatron.lab.train.model import Trainee, layer_context


class Nothing:
    """A model, an optimizer or a schedule without a state."""

    def sharded_state_dict(self, *given: object, **named: object) -> dict:
        return {}

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None: ...


TRAINEE = SimpleNamespace(module=Nothing(), optimizer=Nothing(), scheduler=Nothing())


def draws() -> list[float]:
    """A number from each generator that training may draw from."""
    on_device = torch.Generator()
    on_device.set_state(torch.cuda.get_rng_state())
    drawn = [random.random(), np.random.rand(), torch.rand(1).item()]
    drawn.append(torch.rand(1, generator=on_device).item())
    torch.cuda.set_rng_state(on_device.get_state())
    with checkpoint.get_cuda_rng_tracker().fork("here"):
        return [*drawn, torch.cuda.get_rng_state().sum().item()]


def start() -> None:
    multiprocessing.current_process()._config["daemon"] = False  # the writer is a child
    pretend_cuda()
    checkpoint.get_cuda_rng_tracker().add("here", 3)


@on_cpu_ranks(1)
def test_random_numbers_go_on_where_they_were(rank, tmp_path):
    start()
    draws()
    checkpoint.save(tmp_path, TRAINEE, 1, 10)
    first = draws()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    torch.cuda.manual_seed(1)
    checkpoint.get_cuda_rng_tracker().reset()
    checkpoint.get_cuda_rng_tracker().add("here", 4)
    assert not {*draws()} & {*first}
    assert checkpoint.load(run_folder.latest(tmp_path), TRAINEE) == (1, 10)
    assert draws() == first


@on_cpu_ranks(1)
def test_latest_never_names_what_is_not_there(rank, tmp_path):
    start()
    checkpoint.save(tmp_path, TRAINEE, 1, 10)
    newest, rename = run_folder.latest(tmp_path), Path.rename

    def dies(path: Path, target: Path) -> Path:
        if path.suffix == ".partial":
            raise OSError("killed")
        return rename(path, target)

    with mock.patch.object(Path, "rename", dies), pytest.raises(OSError, match="killed"):
        checkpoint.save(tmp_path, TRAINEE, 2, 20)
    assert run_folder.latest(tmp_path) == newest
    assert checkpoint.load(newest, TRAINEE) == (1, 10)
    checkpoint.save(tmp_path, TRAINEE, 2, 20)
    assert checkpoint.load(run_folder.latest(tmp_path), TRAINEE) == (2, 20)


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

"""When a checkpoint becomes the newest one, and on which ranks a run goes on from it."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("megatron.core", reason="needs the extra `train`")

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from ranks import on_cpu_ranks, run_ranks
from train_words import load

from flux_megatron.integration.cpu_device import pretend_cuda
from flux_megatron.lab.train import checkpoint, data, loop, run_folder
from flux_megatron.lab.train.config import TrainConfig
from flux_megatron.lab.train.model import Trainee

CPU = torch.device("cpu")


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


def started(settings: dict) -> tuple[TrainConfig, Trainee]:
    multiprocessing.current_process()._config["daemon"] = False  # Megatron's writers are children
    pretend_cuda()
    config = load(parallel__tp=dist.get_world_size(), **settings)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    model_parallel_cuda_manual_seed(config.train.seed)
    torch.manual_seed(config.train.seed)
    return config, Trainee(config, CPU)


def trained(rank: int, out: Path, settings: dict, steps: int, resume: bool) -> list[float]:
    """The losses of `steps` steps; a checkpoint of the second one is written, or read before."""
    config, trainee = started(settings)
    done = checkpoint.load(run_folder.latest(out), trainee) if resume else 0
    batches = data.microbatches(Numbers(), config, done * 2, CPU)
    losses = []
    for step in range(done + 1, done + steps + 1):
        losses.append(loop.one_step(config, trainee, batches)["loss"])
        if step == 2:
            checkpoint.save(out, trainee, 2)
    return losses


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({}, (1, 4)),
        ({"model__swiglu": True, "model__bias": True, "model__tied_embeddings": False}, (1,)),
    ],
    ids=["plain", "swiglu"],
)
def test_a_checkpoint_of_two_ranks_resumes_on_others(tmp_path, settings, sizes):
    straight, _ = run_ranks(trained, 2, tmp_path, settings | {"layers": "stock"}, 4, False)
    assert len({*straight}) == 4
    for ranks in sizes:
        for losses in run_ranks(trained, ranks, tmp_path, settings, 2, True):
            assert losses == pytest.approx(straight[2:], abs=1e-5, rel=0)


@on_cpu_ranks(1)
def test_latest_never_names_what_is_not_whole(rank, tmp_path):
    """Of a kill in the middle nothing is seen, and the same step can be written again."""
    config, trainee = started({"layers": "stock"})
    loop.one_step(config, trainee, data.microbatches(Numbers(), config, 0, CPU))
    checkpoint.save(tmp_path, trainee, 1)
    serialization = checkpoint.dist_checkpointing.serialization
    with (
        mock.patch.object(serialization, "save_config", side_effect=OSError("killed")),
        pytest.raises(OSError, match="killed"),
    ):
        checkpoint.save(tmp_path, trainee, 2)
    assert (tmp_path / "checkpoints" / "step_2" / "common.pt").exists()
    assert checkpoint.load(run_folder.latest(tmp_path), trainee) == 1
    checkpoint.save(tmp_path, trainee, 2)
    assert run_folder.latest(tmp_path).name == "step_2"
    assert checkpoint.load(run_folder.latest(tmp_path), trainee) == 2

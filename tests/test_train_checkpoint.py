"""What a checkpoint holds besides tensors, and in which order it becomes the newest one."""

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
from ranks import on_cpu_ranks

from flux_megatron.integration.cpu_device import pretend_cuda
from flux_megatron.lab.train import checkpoint, run_folder


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

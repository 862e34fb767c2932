"""A step in which a wait ran out of time reaches neither weights nor a checkpoint, on any rank."""

from __future__ import annotations

import contextlib
import time
import types
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import on_cpu_ranks, run_ranks

import flux_megatron
from flux_megatron import errors
from flux_megatron.integration.step_check import confirm_steps
from flux_megatron.nn.functions import column_parallel_linear, row_parallel_linear
from flux_megatron.symm import step_end
from flux_megatron.symm.status import Status

LATE_S, TIMEOUT_S = 8.0, 3.0


class Model:
    """An MLP of two linear layers; rank 1 comes late to the backward of step `late`."""

    def __init__(self, rank: int) -> None:
        self.rank, self.step, self.late = rank, 0, 0
        torch.manual_seed(rank)
        self.x = torch.randn(4, 2, 6)
        self.weights = [torch.randn(*s).requires_grad_() for s in ((8, 6), (6, 8))]

    def forward_backward(self) -> None:
        self.step += 1
        up, down = self.weights
        group = dist.group.WORLD
        y = row_parallel_linear(
            column_parallel_linear(self.x, up, None, group=group), down, group=group
        )
        if self.rank == 1 and self.step == self.late:
            time.sleep(LATE_S)
        y.sum().backward()


def training_module(model: Model, folder: Path) -> types.ModuleType:
    """What stands for megatron.training.training: a step, a checkpoint, and nothing that checks."""
    module = types.ModuleType("megatron.training.training")

    def train_step(forward_step_func, data_iterator, model, optimizer, *more, iteration=None):
        forward_step_func()
        return optimizer.step()

    def save_checkpoint(iteration, model, *more):
        (folder / f"{iteration}.{model.rank}.pt").write_bytes(b"weights")

    module.train_step, module.save_checkpoint = train_step, save_checkpoint
    confirm_steps(module)
    return module


def run_steps(rank: int, late: int, folder: Path) -> tuple[str, int, list[bool]]:
    """The error's type, the last step, and which weights that step has changed.

    The host does not look during calls, like one that runs ahead of its GPU.
    """
    model = Model(rank)
    model.late = late
    optimizer = torch.optim.SGD(model.weights, lr=0.1)
    training = training_module(model, folder)
    before: list[torch.Tensor] = []
    error = ""
    with mock.patch.object(Status, "late", _only_when_asked(Status.late)):
        for iteration in range(1, 4):
            before = [w.detach().clone() for w in model.weights]
            optimizer.zero_grad()
            try:
                training.train_step(
                    model.forward_backward, None, model, optimizer, iteration=iteration
                )
                training.save_checkpoint(iteration, model)
            except errors.FluxError as caught:
                error = type(caught).__name__
                break
    changed = [not torch.equal(a, b) for a, b in zip(before, model.weights, strict=True)]
    return error, model.step, changed


def _only_when_asked(late: Callable[[Status], str]) -> Callable[[Status], str]:
    """As a host sees the status of calls that it has only enqueued."""
    asked: list[bool] = []
    synchronized = step_end.synchronize

    def synchronize() -> None:
        asked.append(True)
        synchronized()

    step_end.synchronize = synchronize
    return lambda status: late(status) if asked else ""


@pytest.mark.parametrize("late", [0, 2])
def test_a_late_rank_s_step_reaches_neither_weights_nor_a_checkpoint(tmp_path, late):
    environment = {"FLUX_MEGATRON_TIMEOUT_S": str(TIMEOUT_S)}
    answers = run_ranks(run_steps, 2, late, tmp_path, environment=environment)
    saved = sorted(path.name for path in tmp_path.iterdir())
    if not late:
        assert [(error, step) for error, step, _ in answers] == [("", 3)] * 2
        assert all(all(changed) for _, _, changed in answers)
        assert saved == [f"{step}.{rank}.pt" for step in (1, 2, 3) for rank in (0, 1)]
        return
    assert [(error, step) for error, step, _ in answers] == [
        ("SignalTimeout", 2), ("GroupBroken", 2)
    ]  # fmt: skip
    assert not any(any(changed) for _, _, changed in answers)
    assert saved == ["1.0.pt", "1.1.pt"]


@on_cpu_ranks(2)
def test_a_rank_without_a_timeout_of_its_own_asks_the_others(rank):
    """Rank 1 makes no call after that in which rank 0 was late, so only the answer can tell it."""
    Model(rank).forward_backward()
    flux_megatron.confirm_step()
    late = "rank 0 waited" if rank == 0 else ""
    said = "rank 0 failed in the middle of a call: SignalTimeout: rank 0 waited"
    with (
        mock.patch.object(Status, "late", return_value=late),
        mock.patch.object(
            Status, "tripped", new_callable=mock.PropertyMock, return_value=bool(late)
        ),
        pytest.raises(errors.SignalTimeout if late else errors.GroupBroken, match=late or said),
    ):
        flux_megatron.confirm_step()


@on_cpu_ranks(2, environment={"FLUX_MEGATRON_TIMEOUT_S": str(TIMEOUT_S)})
def test_nothing_is_saved_after_a_timeout(rank, tmp_path):
    """Evaluation comes between the last step and the checkpoint."""
    model = Model(rank)
    training = training_module(model, tmp_path)
    model.forward_backward()
    model.late = 2
    with pytest.raises(errors.FluxError, match="waited 3 s for communication tile"):  # noqa: PT012
        with contextlib.suppress(errors.SignalTimeout):  # a program that goes on
            model.forward_backward()
        training.save_checkpoint(1, model)
    assert not [*tmp_path.iterdir()]

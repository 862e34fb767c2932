"""The soak in small, and that it can fail. It is meant for GPUs; `soak.py` says how."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch.distributed as dist
from ranks import DEVICE, here, on_device
from soak import soak
from soak_groups import soak_groups
from soak_kinds import on_hopper

from flux_megatron.symm.device import copy_engine

CALLS, KINDS = (2000, 32) if DEVICE == "cuda" else (30, 10)
ROUNDS = 30 if DEVICE == "cuda" else 14


def small(rank: int, **changes) -> dict:
    if dist.get_backend() == "gloo":  # whose collectives no graph can capture
        changes["graphs"] = 0.0
    return soak(dist.group.WORLD, here(), calls=CALLS, count=KINDS, **changes)


def with_lost_pushes(rank: int) -> dict:
    """Rank 1's copy engine, Python's, loses one push in twenty; the signals come."""
    engine = type(copy_engine(here()))
    turns, copy = itertools.count(1), engine.copy

    def lossy(self, destination: int, source: int, size_bytes: int) -> None:
        if rank != 1 or next(turns) % 20:
            copy(self, destination, source, size_bytes)

    with mock.patch.object(engine, "copy", lossy):
        return small(rank, graphs=0.0)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", [2, 4])
def test_random_calls_with_random_late_ranks(world_size):
    rows = on_device(small, world_size, limit_s=280)
    assert [row["failures"] for row in rows] == [0] * world_size, rows
    assert all(row["calls"] == CALLS for row in rows)
    expected = {"fused", "pipelined", "sequential"} | ({"hopper"} if on_hopper(DEVICE) else set())
    assert expected <= {*rows[0]["strategies"]}


@pytest.mark.timeout(300)
def test_a_lost_push_is_found():
    by_python = {"FLUX_MEGATRON_NATIVE": "0"}
    for row in on_device(with_lost_pushes, 2, limit_s=280, environment=by_python, fresh=True):
        assert row["failures"] > 0


def groups_come_and_go(rank: int) -> dict:
    return soak_groups(ROUNDS, seed=1)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", [2, 4])
def test_groups_that_come_and_go(world_size):
    # on GPUs a rank may first compile a kernel
    short = {"FLUX_MEGATRON_TIMEOUT_S": "2" if DEVICE == "cpu" else "15"}
    rows = on_device(groups_come_and_go, world_size, limit_s=280, environment=short, fresh=True)
    assert [row["rounds"] for row in rows] == [ROUNDS] * world_size
    ends = [what for what in rows[0]["done"] if what.endswith((", destroy", ", release"))]
    assert len(ends) > 1, rows[0]

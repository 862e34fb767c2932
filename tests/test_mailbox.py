"""Mailboxes in the host's memory, on a stand-in for the driver: who writes where, what is left
behind, and how a stream's wait ends.
"""

from __future__ import annotations

import gc
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fake_cuda_memory import DEVICE, fake
from ranks import on_cpu_ranks

from flux_megatron import errors
from flux_megatron.overlap import arrivals
from flux_megatron.symm import (
    cuda_backend,
    cuda_memory,
    device,
    mailbox,
    mailbox_watch,
    signals,
)
from flux_megatron.symm.places import Missing
from flux_megatron.symm.status import Status

SIZE = 4096


@on_cpu_ranks(3)
def test_others_write_into_the_mailbox_and_the_gpu_has_its_own_memory(rank):
    with fake(str(rank)) as driver:
        buffer = mailbox.allocate(SIZE, dist.group.WORLD, DEVICE)
        assert [one.data_ptr() for one in buffer.shards] == buffer.pointers.tolist()
        assert buffer.own is buffer.mailbox
        dist.barrier()
        for other, shard in enumerate(buffer.shards):
            shard[rank] = 10 * other + rank + 1
        dist.barrier()
        theirs = [0 if other == rank else 10 * rank + other + 1 for other in range(3)]
        assert buffer.mailbox[:3].tolist() == theirs
        assert buffer.shards[rank][:3].nonzero().tolist() == [[rank]]
        assert len(driver.registered) == 3
        del buffer, shard
        gc.collect()
        assert not driver.registered


def test_the_end_of_a_process_waits_for_no_gpu_and_leaves_mailboxes_there(monkeypatch):
    waits, box = mock.Mock(), torch.zeros(SIZE, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "synchronize", waits)
    monkeypatch.setattr(cuda_memory, "_ending", True)
    monkeypatch.setattr(mailbox, "_left", [])
    mailbox._unregister(box, DEVICE)
    assert mailbox._left == [box]
    assert not waits.called


def test_a_stream_waits_for_the_low_bits_of_an_epoch():
    """The driver takes 32 of them."""
    engine, calls = object.__new__(cuda_backend.CudaCopyEngine), mock.Mock()
    engine._stream, engine._call = 5, calls
    engine.wait_count(64, 2**32 + 3)
    calls.assert_called_once_with("cuStreamWaitValue32", 5, 64, 3, 0)


@pytest.mark.parametrize("captured", [False, True])
def test_a_capture_ends_with_the_stream_behind_bounded_waits_alone(captured, monkeypatch):
    """Where kernels stood behind the stream, nothing would bound a replay."""
    stream, channel = mock.Mock(), mock.MagicMock()
    monkeypatch.setattr(arrivals, "capturing", lambda device: captured)
    monkeypatch.setattr(arrivals, "arrival_stream", lambda device: stream)
    in_flight = mock.Mock(calls=[channel])
    channel.region.words, channel.region.rank, channel.region.mailbox = (64, 128), 0, 4096
    arrivals._bring((arrivals.Part(0, 1, 0, ((0, 16),)),), in_flight)
    assert [one[0] for one in stream.mock_calls] == ["wait_count", "copy", "signal"]
    arrivals._end(in_flight)
    assert stream.join.called == captured


REFUSALS = ("cuMemHostRegister", "cuMemHostGetDevicePointer")


@pytest.mark.parametrize("name", REFUSALS)
@on_cpu_ranks(2)
def test_a_refusal_is_known_to_every_rank(rank, name):
    with fake(str(rank), *[name] * rank) as driver:
        said = f"^symmetric memory of {SIZE} bytes: rank 1: {name} failed: CUDA_ERROR_REFUSED$"
        with pytest.raises(errors.WorkspaceError, match=said):
            mailbox.allocate(SIZE, dist.group.WORLD, DEVICE)
        gc.collect()
        assert not driver.registered


@on_cpu_ranks(2)
def test_a_gpu_of_two_ranks_has_no_mailbox(rank):
    with fake("the one"), pytest.raises(errors.WorkspaceError, match="several ranks share a GPU"):
        mailbox.allocate(SIZE, dist.group.WORLD, DEVICE)


@pytest.mark.parametrize(
    ("shared", "box", "found"),
    [
        (None, None, None), ("no link", None, Missing("no link", mailboxes=True)),
        ("no link", "no memory", Missing("no link")),
    ],
)  # fmt: skip
def test_gpus_that_reach_none_of_each_other_have_mailboxes(monkeypatch, shared, box, found):
    monkeypatch.setattr(cuda_memory, "why_not_shared", lambda group, device: shared)
    monkeypatch.setattr(mailbox, "why_none", lambda group, device: box)
    two, gpu = SimpleNamespace(size=lambda: 2), torch.device("cuda", 0)
    assert device.missing(two, gpu) == found
    assert device.missing(two, torch.device("cpu")) is None


WORDS, EPOCH = signals.pad_words(2), 2**31  # as a signed word the smallest
FIRST, THIRD = signals.slot(1, 0), signals.slot(1, 3)


class Box:
    """The mailbox of rank 0, whose slots hold the epoch before; a watch of it, and its record."""

    def __init__(self) -> None:
        self.own = torch.full((2 * WORDS,), 2**31 - 1, dtype=torch.int32)
        self.status = Status(DEVICE)
        self.status.name(self.own, "rank 0", "slot {}".format, lambda: 0.05)
        self.awaited = mailbox_watch.Awaited(0, self, WORDS, self.status)

    def come(self, *slots: int, epoch: int = EPOCH) -> None:
        for slot in slots:
            self.own[slot] = signals.as_int32(epoch)

    @property
    def ended(self) -> bool:
        eager, captured = self.own[:WORDS].tolist(), self.own[WORDS:].tolist()
        return all(signals.reached(one, EPOCH) for one in eager) and captured == [1] * WORDS


def test_a_late_wait_ends_and_names_what_it_waited_for():
    box = Box()
    box.awaited.expect(EPOCH, (FIRST, THIRD), 0.05)
    box.come(FIRST)
    box.awaited.look()
    time.sleep(0.06)
    box.awaited.look()
    assert not box.status.tripped, "the call has not begun"
    box.come(box.awaited.begun)
    box.awaited.look()
    assert not box.status.tripped, "it has only just begun"
    time.sleep(0.06)
    box.awaited.look()
    assert box.status.late() == (
        f"rank 0 waited 0.05 s for slot {THIRD}: epoch {signals.as_int32(EPOCH)} expected, "
        f"{2**31 - 1} seen"
    )
    assert box.ended


def test_each_call_has_its_time():
    box = Box()
    for epoch in (EPOCH, EPOCH + 1):
        box.awaited.expect(epoch, (FIRST,), 0.05)
    box.come(box.awaited.begun)
    box.awaited.look()
    box.come(FIRST)
    time.sleep(0.06)
    box.awaited.look()
    assert not box.status.tripped, "the first has come, the second has not begun"
    box.come(box.awaited.begun, epoch=EPOCH + 1)
    box.awaited.look()
    assert not box.status.tripped, "the second has only just begun"
    time.sleep(0.06)
    box.awaited.look()
    assert box.status.tripped


def test_waits_end_with_those_of_the_group_and_of_replays_each_time():
    box = Box()
    box.awaited.expect(EPOCH, (FIRST,), 60)
    box.status.end_waits("rank 1 makes another call")
    for _ in range(2):
        box.awaited.look()
        assert box.ended
        box.own[WORDS:] = 0  # a replay
    assert not box.status.late()


def test_a_thread_looks_until_a_channel_is_forgotten(monkeypatch):
    monkeypatch.setattr(mailbox_watch, "LOOK_S", 0.01)
    monkeypatch.setattr(mailbox_watch, "_watched", set())
    box = Box()
    mailbox_watch.watch(box.awaited)
    box.awaited.expect(EPOCH, (FIRST,), 0.02)
    box.come(box.awaited.begun)
    end_s = time.monotonic() + 5
    while not box.ended and time.monotonic() < end_s:
        time.sleep(0.01)
    assert box.ended
    mailbox_watch.forget(box.awaited)
    assert not mailbox_watch._watched


def test_what_still_waits_ends_before_its_memory_goes():
    box = Box()
    box.awaited.expect(EPOCH, (FIRST,), 60)
    mailbox_watch.forget(box.awaited)
    assert box.ended
    assert not box.status.tripped

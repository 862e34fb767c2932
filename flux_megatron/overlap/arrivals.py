"""What copy engines push into a rank's mailbox (`symm.mailbox`) comes to its GPU by a stream that
waits for nothing but the signals there. So neither SMs nor the caller's stream wait for the link.

    stream of arrivals   wait [A] in the mailbox | copy to the region | signal [A] there | ...

Kernels wait for the second signal, with their bound. What bounds the stream's own waits is
`symm.mailbox_watch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from flux_megatron.symm import signals
from flux_megatron.symm.device import arrival_stream, capturing
from flux_megatron.symm.program import CallProgram, ChannelSlots

if TYPE_CHECKING:
    from flux_megatron.symm.channel import Call


class Part(NamedTuple):
    """What a signal announces: `blocks` are where each begins in the region, its bytes and, of a
    part of the columns, its rows and their pitch.
    """

    source: int
    comm_tile: int
    blocks: tuple[tuple[int, ...], ...]


def bring(channel: ChannelSlots, parts: Sequence[Part]) -> None:
    """Have the parts come to the region as they arrive in the mailbox.

    Behind the GEMM that waits for them, if one does, and behind all that peers wait for: with
    CUDA_DEVICE_MAX_CONNECTIONS=1 what is enqueued later may wait for them too.
    """
    p = channel.program
    with p.phase("arrivals"):
        p.host(partial(_bring, channel.number, tuple(parts)))


def end(p: CallProgram) -> None:
    """Behind all that waits with a bound: a capture ends with the stream in it."""
    p.host(_end)


def _end(in_flight: Any) -> None:
    device = in_flight.space.device
    if capturing(device):
        arrival_stream(device).join()


def begin_captured(call: Call) -> None:
    """Behind the rank barrier: a replay resets the signals on its GPU, and what a capture holds
    of another stream begins behind the caller's.
    """
    call.region.pads[call.region.rank].zero_()
    arrival_stream(call.region.own_pad.device).fork()


def _bring(number: int, parts: tuple[Part, ...], in_flight: Any) -> None:
    """No event orders the stream behind the caller's: a peer signals when it has ended the call
    before this one, for which it has awaited what this rank pushed behind the last use of the
    region (docs/memory_model.md, 2).
    """
    call: Call = in_flight.calls[number]
    region, device = call.region, in_flight.space.device
    captured = capturing(device)  # first: it gives a new thread the context that the driver needs
    stream, epoch = arrival_stream(device), call.epoch
    to, box = region.words[region.rank], region.mailbox
    here, there = region.pads[region.rank].data_ptr(), region.own_pad.data_ptr()
    if not captured:
        call.channel.expect(epoch, [signals.slot(one.source, one.comm_tile) for one in parts])
        begun = signals.slot_bytes(region.rank, 0)
        in_flight.engine.signal(there + begun, epoch)  # behind this call's pushes
    for source, comm_tile, blocks in parts:
        slot = signals.slot_bytes(source, comm_tile)
        stream.wait_count(there + slot, epoch)
        for first, size_bytes, *rows in blocks:
            method = stream.copy_rows if rows else stream.copy
            method(to + first, box + first, size_bytes, *rows)
        stream.signal(here + slot, epoch)

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
from flux_megatron.symm.program import CallProgram

if TYPE_CHECKING:
    from flux_megatron.symm.channel import Call


class Part(NamedTuple):
    """What a signal announces: `blocks` are where each begins in the region of the channel of this
    number, its bytes and, of a part of the columns, its rows and their pitch.
    """

    channel: int
    source: int
    comm_tile: int
    blocks: tuple[tuple[int, ...], ...]


def bring(p: CallProgram, parts: Sequence[Part]) -> None:
    """Have the parts come to their regions as they arrive in the mailbox.

    Behind the GEMM that waits for them, if one does, and behind all that peers wait for: with
    CUDA_DEVICE_MAX_CONNECTIONS=1 what is enqueued later may wait for them too.
    """
    with p.phase("arrivals"):
        p.host(partial(_bring, tuple(parts)))


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


def _bring(parts: tuple[Part, ...], in_flight: Any) -> None:
    """No event orders the stream behind the caller's: a peer signals when it has ended the call
    before this one, for which it has awaited what this rank pushed behind the last use of the
    region (docs/memory_model.md, 2).
    """
    device = in_flight.space.device
    captured = capturing(device)  # first: it gives a new thread the context that the driver needs
    if not captured:
        for number in dict.fromkeys(one.channel for one in parts):
            _begin(in_flight, number, [one for one in parts if one.channel == number])
    stream = arrival_stream(device)
    for number, source, comm_tile, blocks in parts:
        call: Call = in_flight.calls[number]
        region, epoch, slot = call.region, call.epoch, signals.slot_bytes(source, comm_tile)
        to, box = region.words[region.rank], region.mailbox
        here, there = region.pads[region.rank].data_ptr(), region.own_pad.data_ptr()
        stream.wait_count(there + slot, epoch)
        for first, size_bytes, *rows in blocks:
            method = stream.copy_rows if rows else stream.copy
            method(to + first, box + first, size_bytes, *rows)
        stream.signal(here + slot, epoch)


def _begin(in_flight: Any, number: int, parts: Sequence[Part]) -> None:
    """Behind this call's pushes the watcher's bound begins."""
    call: Call = in_flight.calls[number]
    region = call.region
    call.channel.expect(call.epoch, [signals.slot(one.source, one.comm_tile) for one in parts])
    begun = signals.slot_bytes(region.rank, 0)
    in_flight.engine.signal(region.own_pad.data_ptr() + begun, call.epoch)

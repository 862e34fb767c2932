"""Waits for the signals of other ranks, in warps that do not multiply: they cost the tensor cores
nothing until data is really late.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flux_megatron.kernels import wait_records
from flux_megatron.kernels.gluon_versions import Number, Pointer, aggregate
from flux_megatron.kernels.hopper_primitives import (
    MAX_COMM_TILES,
    count_relaxed_gpu,
    time_ns,
    wait_acquire_sys,
)

RECORDS = gl.constexpr(wait_records.RECORDS.value)
RECORD_WORDS = gl.constexpr(wait_records.WORDS.value)


@aggregate
class Signals:
    """The slots that this rank awaits, and where a late wait and, unless `records` is None, every
    wait is recorded (`wait_records`).
    """

    pad: Pointer
    status: Pointer
    records: Pointer | gl.constexpr
    epoch: Number
    timeout_ns: Number

    @gluon.jit
    def deadline(self):
        return time_ns() + self.timeout_ns

    @gluon.jit
    def none_arrived(self):
        """For `await_once`: a CTA remembers what it has seen arrive, so it asks once for each
        communication tile, not once for each of its tiles.
        """
        return (self.epoch * 0).to(gl.int64)  # one bit for each (source, communication tile)

    @gluon.jit
    def await_once(self, arrived, source, comm_tile, comm_tiles, tile, deadline):
        """Wait for one of the `comm_tiles` communication tiles of `source`, for `tile`'s sake;
        gives what has arrived now.
        """
        bit = (self.epoch * 0 + 1).to(gl.int64) << (source * comm_tiles + comm_tile)
        if arrived & bit == 0:
            slot = source * MAX_COMM_TILES + comm_tile
            begin_ns = wait_begins(self.records)
            wait_acquire_sys(self.pad, slot, self.epoch, deadline, self.status)
            wait_ends(self.records, begin_ns, tile, source)
            arrived = arrived | bit
        return arrived


@gluon.jit
def wait_begins(records):
    """The time, where waits are recorded; `wait_records` has the portable pair."""
    begin_ns = 0
    if records is not None:
        begin_ns = time_ns()
    return begin_ns


@gluon.jit
def wait_ends(records, begin_ns, tile, source):
    """Record the wait of this CTA's `tile` for `source`, which began at `begin_ns`."""
    if records is not None:
        end_ns = time_ns()
        number = count_relaxed_gpu(records)
        if number <= RECORDS:
            record = records + number * RECORD_WORDS
            gl.store(record, gl.program_id(0).to(gl.int64))
            gl.store(record + 1, tile.to(gl.int64))
            gl.store(record + 2, source.to(gl.int64))
            gl.store(record + 3, begin_ns)
            gl.store(record + 4, end_ns)

"""Waits for the signals of other ranks, in warps that do not multiply: they cost the tensor cores
nothing until data is really late.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flux_megatron.kernels.gluon_versions import Number, Pointer, aggregate
from flux_megatron.kernels.hopper_primitives import (
    MAX_COMM_TILES,
    wait_acquire_sys,
)
from flux_megatron.kernels.primitives import time_ns


@aggregate
class Signals:
    """The slots that this rank awaits, and where a late wait is recorded."""

    pad: Pointer
    status: Pointer
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
    def await_once(self, arrived, source, comm_tile, comm_tiles, deadline):
        """Wait for one of the `comm_tiles` communication tiles of `source`; gives what has arrived
        now.
        """
        bit = (self.epoch * 0 + 1).to(gl.int64) << (source * comm_tiles + comm_tile)
        if arrived & bit == 0:
            slot = source * MAX_COMM_TILES + comm_tile
            wait_acquire_sys(self.pad, slot, self.epoch, deadline, self.status)
            arrived = arrived | bit
        return arrived

"""Calls in pieces that lists make: what stands for a strategy's gather or reduction in flight."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from flux_megatron.symm.recording import Recording, Steps, noted

if TYPE_CHECKING:
    from flux_megatron.overlap.steady import Steady

Begun = tuple[int, Steps, tuple[int, ...], list[Tensor]]  # epoch, steps, registers, what is made


class InPieces:
    """A call that lists make, instead of what a strategy's `start_gather` or `start_gemm_rs` gives.
    It holds its tensors until it ends.
    """

    def __init__(self, steady: Steady, begun: Begun, x: Tensor, w: Tensor) -> None:
        self._steady, self._begun = steady, begun
        self._going = steady.going_on(begun, x, w, None)
        self._go_on()

    def _go_on(self, to_end: bool = False) -> Any:
        """To the caller's next turn, or behind all of them."""
        try:
            for lent in self._going:
                if not to_end:
                    return lent
        except BaseException as error:
            self._steady.break_off(error)
            raise

    def complete(self) -> Tensor:
        rows: Tensor = self._go_on()
        return rows

    def close(self) -> None:
        self.finish()

    def finish(self) -> Any:
        self._go_on(to_end=True)
        return self._steady.ended(self._begun)


class NotedPieces:
    """What a strategy's `start_gather` or `start_gemm_rs` gives, while the call is recorded."""

    def __init__(self, steady: Steady, recording: Recording, pieces: Any) -> None:
        self._steady, self._recording, self._pieces = steady, recording, pieces
        self._lent: tuple[Tensor, ...] = ()

    def _noted(self, piece: Callable[[], Any]) -> Any:
        self._recording.stop(None, self._lent)
        with noted(self._recording):
            return piece()

    def complete(self) -> Tensor:
        rows: Tensor = self._noted(self._pieces.complete)
        self._lent = (rows,)
        return rows

    def close(self) -> None:
        self._noted(self._pieces.close)
        if not self._lent:
            self._recording.refused = "its rows were not asked for"
        self._steady.keep(self._recording, None)

    def finish(self) -> Tensor:
        y: Tensor = self._noted(self._pieces.finish)
        self._steady.keep(self._recording, y)
        return y

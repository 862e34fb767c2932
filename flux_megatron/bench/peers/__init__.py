"""Other ways to overlap the same operations: what a user would pick instead of us.

A peer is optional. One that is missing is told so in its rows.
"""

from __future__ import annotations

from typing import Protocol

from flux_megatron.bench.backward import Backward
from flux_megatron.bench.candidates import Call
from flux_megatron.bench.forward import Forward
from flux_megatron.bench.peers.async_tp import AsyncTp
from flux_megatron.bench.peers.transformer_engine import TransformerEngine
from flux_megatron.bench.peers.xformers import Xformers


class Peer(Protocol):
    """`names` are its candidates for a pattern; `build`, collective, gives their calls."""

    name: str

    def names(self, pattern: str) -> tuple[str, ...]: ...

    def unavailable(self) -> str | None: ...

    def build(self, experiment: Forward | Backward) -> dict[str, Call]: ...


def all_peers() -> list[Peer]:
    return [AsyncTp(), TransformerEngine(), Xformers()]

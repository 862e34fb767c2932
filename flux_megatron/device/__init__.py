"""For kernels of your own that send and await data among the GPUs of a node: docs/extend.md.

| module | what it has |
| --- | --- |
| here | for the host: `Channel`, `Call`, `SLOTS` |
| `flux_megatron.device.triton` | what a Triton kernel calls |
| `flux_megatron.device.gluon` | the same names for Gluon, on GPUs of compute capability 9 |

Above `symm`, `kernels` and `overlap`, whose channels, memory order and rank barrier it names.
"""

from __future__ import annotations

from flux_megatron.device.host import SLOTS, Call, Channel

__all__ = ["SLOTS", "Call", "Channel"]

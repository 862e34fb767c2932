"""How many registers a thread of the kernels of few rows may have.

Up to 32 rows Triton multiplies by mma.sync, which takes its operands from registers. Left alone,
ptxas often limits a thread to 96 or 128 of them, spills some, and loads an operand right before its
product: up to 14 % of a call.
"""

from __future__ import annotations

import torch

from flux_megatron.kernels import launch
from flux_megatron.kernels.hopper_config import SHARED_BYTES
from flux_megatron.kernels.sizes import cdiv
from flux_megatron.problem import Tile

MOST_ROWS = 32  # beyond, wgmma takes its operands from shared memory
OF_AN_SM, OF_A_THREAD = 1 << 16, 255
RESERVED_BYTES = 1 << 10  # of shared memory, by CUDA, for each CTA


def registers_of(
    tile: Tile, work_tiles: int, layout: str, dtype: torch.dtype, device: torch.device
) -> int:
    """As many as let those CTAs on an SM at once that its shared memory holds and `work_tiles`
    need. 0, the compiler's choice, where more were no faster, or not measured.
    """
    if device.type == "cpu" or torch.cuda.get_device_capability(device)[0] != 9:
        return 0
    if tile.block_m > MOST_ROWS or layout != "nt" or dtype.itemsize != 2:
        return 0
    # Triton keeps one stage less than it counts where MMAs read registers
    stages_bytes = (tile.num_stages - 1) * (tile.block_m + tile.block_n) * tile.block_k * 2
    fitting = max(1, SHARED_BYTES // (stages_bytes + RESERVED_BYTES))
    resident = min(fitting, cdiv(work_tiles, launch.sms(device)))
    return min(OF_A_THREAD, OF_AN_SM // (resident * tile.num_warps * 32) // 8 * 8)

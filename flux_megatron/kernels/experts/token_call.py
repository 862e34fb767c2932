"""The launches of `token_routes` and `token_rows`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flux_megatron.kernels import launch
from flux_megatron.kernels.experts import token_routes, token_rows
from flux_megatron.kernels.sizes import cdiv, next_power_of_2
from flux_megatron.kernels.triton_launch import launch_kernel
from flux_megatron.problem import Tile
from flux_megatron.symm import signals
from flux_megatron.symm.channel import Call

ROUTE_ROWS = 64  # tokens of a CTA that exchanges or places them
ROWS, COLUMNS = 16, 512  # of a tile that travels, is spread or added up
CTAS_OF_AN_SM = 3  # so that enough loads are on the way
MOST_CTAS = signals.WORK_WORDS - signals.WORK_CLAIMS


class Routes(NamedTuple):
    """Where rows of tokens go: `places` and what else `token_routes` finds.

    `sent` int32 [T] has bit r where rank r has an expert of this rank's token; `received` int32
    [1, E] counts the rows of this rank's experts as they lie, `ends` says where they end. `chosen`
    [T, R E] are the choices.
    """

    places: Tensor
    sent: Tensor
    received: Tensor
    ends: Tensor
    chosen: Tensor
    capacity: int

    @property
    def tokens(self) -> int:
        return self.places.shape[1]

    @property
    def slots(self) -> int:
        return self.places.shape[2]


def header_bytes(world_size: int, experts: int, tokens: int) -> int:
    """Of what ranks tell each other: totals, counts of blocks, and a word for each token and own
    expert; or of as many gradients.
    """
    blocks = cdiv(tokens, ROUTE_ROWS)
    counts = world_size * (world_size * experts + 1) + world_size * blocks * experts
    return 4 * (counts + world_size * tokens * experts)


def region_bytes(world_size: int, tokens: int, columns: int, itemsize: int) -> int:
    """Of the rows of tokens of all ranks."""
    return world_size * tokens * columns * itemsize


def exchange(
    call: Call, chosen: Tensor, weights: Tensor, topk: int, capacity: int, reverse: bool
) -> tuple[Routes, Tensor]:
    """The routes of `chosen` [T, R E] of all ranks, and the weights of rows, fp32 [capacity]."""
    world_size, tokens = call.region.world_size, len(chosen)
    experts, blocks = chosen.shape[1] // world_size, cdiv(tokens, ROUTE_ROWS)
    slots, integers = min(topk, experts), call.region.pads[call.region.rank].new_empty
    sent, counts = integers(tokens), integers(blocks, chosen.shape[1] + 1)
    places, received = integers(world_size, tokens, slots), integers(1, experts)
    ends = integers(experts)
    of_rows = weights.new_empty(capacity, dtype=torch.float32)
    pointers, pad, pad_pointers, status = call.tensors
    rank, epoch, timeout_ns = call.numbers
    sizes = {
        "WORLD_SIZE": world_size, "EXPERTS": experts, "BLOCK_E": next_power_of_2(experts),
        "ROWS": ROUTE_ROWS,
    }  # fmt: skip
    launch_kernel(
        token_routes.exchange_choices_kernel, (blocks,), Tile(num_warps=8),
        (chosen.view(torch.uint8), weights, sent, counts, call.channel.tile_counters, pointers,
         pad_pointers),
        (rank, epoch, tokens, blocks, topk), **sizes,
    )  # fmt: skip
    launch_kernel(
        token_routes.place_rows_kernel, (world_size * blocks,), Tile(num_warps=8),
        (places, of_rows, received, ends, pointers, pad, status),
        (rank, epoch, timeout_ns, tokens, blocks, topk, capacity),
        SLOTS=slots, BLOCK_R=next_power_of_2(world_size), REVERSE=reverse, **sizes,
    )  # fmt: skip
    return Routes(places, sent, received, ends, chosen, capacity), of_rows


def return_gradients(call: Call, gradients: Tensor, routes: Routes, like: Tensor) -> Tensor:
    """Of the weights of rows, fp32 [capacity], as those of `like` [T, R E]."""
    world_size, tokens, slots = routes.places.shape
    experts, blocks = routes.chosen.shape[1] // world_size, cdiv(tokens, ROUTE_ROWS)
    found = torch.empty_like(like)
    pointers, pad, pad_pointers, status = call.tensors
    rank, epoch, timeout_ns = call.numbers
    sizes = {"WORLD_SIZE": world_size, "SLOTS": slots, "ROWS": ROUTE_ROWS}
    launch_kernel(
        token_routes.return_gradients_kernel, (blocks,), Tile(num_warps=4),
        (gradients, routes.places, call.channel.tile_counters, pointers, pad_pointers),
        (rank, epoch, tokens, blocks), BLOCK_S=next_power_of_2(slots), **sizes,
    )  # fmt: skip
    launch_kernel(
        token_routes.collect_gradients_kernel, (blocks,), Tile(num_warps=8),
        (found, routes.chosen.view(torch.uint8), pointers, pad, status),
        (rank, epoch, timeout_ns, tokens), EXPERTS=experts, BLOCK_E=next_power_of_2(experts),
        **sizes,
    )  # fmt: skip
    return found


def send(call: Call, x: Tensor, routes: Routes) -> Tensor:
    """Rows [capacity, K] of this rank's experts, from x [T, K] of all ranks; nothing is written
    behind those that came.
    """
    rows = x.new_empty(routes.capacity, x.shape[1])
    tiles = 2 * call.region.world_size - 1
    _move(token_rows.send_tokens_kernel, call, (x, rows), routes, tiles)
    return rows


def give_back(call: Call, rows: Tensor, routes: Routes) -> Tensor:
    """y [T, N]: of each token of this rank the sum of its rows [capacity, N] on all ranks."""
    y = rows.new_empty(routes.tokens, rows.shape[1])
    _move(token_rows.return_tokens_kernel, call, (rows, y), routes, call.region.world_size)
    return y


def _move(kernel, call: Call, data: tuple[Tensor, Tensor], routes: Routes, rounds: int) -> None:
    """Launch a kernel with so many tiles for each ROWS tokens."""
    columns, blocks = data[0].shape[1], cdiv(routes.tokens, ROWS)
    (ctas,) = launch.persistent_grid(data[0].device, rounds * blocks)
    if ctas > 1:
        ctas = min(rounds * blocks, CTAS_OF_AN_SM * ctas, MOST_CTAS)
    launch_kernel(
        kernel, (ctas,), Tile(num_warps=8),
        (*data, routes.places, routes.sent, call.channel.tile_counters, call.channel.work_counter,
         *call.tensors),
        (*call.numbers, routes.tokens, blocks, cdiv(blocks, signals.MAX_COMM_TILES)), (columns,),
        WORLD_SIZE=call.region.world_size, SLOTS=routes.slots, ROWS=ROWS,
        COLUMNS=min(COLUMNS, next_power_of_2(columns)),
    )  # fmt: skip

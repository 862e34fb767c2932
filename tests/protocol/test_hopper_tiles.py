"""The orders in which the Hopper kernels take their tiles, as plain functions of numbers.

The kernels themselves run on GPUs only. What can be proved here: every tile is made once, waits
come in the order of arrival, and host and kernel agree on what a communication tile holds.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from flux_megatron.kernels import (
    hopper_ag_gemm,
    hopper_gemm,
    hopper_gemm_rs,
    hopper_scheduler,
    hopper_tile,
)
from flux_megatron.kernels.hopper_cuts import Cuts, cuts_of_gather, cuts_of_scatter
from flux_megatron.kernels.sizes import cdiv
from flux_megatron.symm.signals import PARTIAL_COUNTERS

PROGRAMS = 132
SHAPES = [  # tiles of a shard: rows, columns
    (1, 1), (1, 7), (2, 48), (3, 10), (4, 48), (8, 5), (16, 12), (24, 3),
]  # fmt: skip
WORLD_SIZES = [1, 2, 3, 4, 8]
GROUPS = [1, 2, 8, 11, 16]


@pytest.fixture(autouse=True)
def plain_functions(monkeypatch):
    """Jit functions that others call become the Python functions that they were."""
    for module in (hopper_ag_gemm, hopper_gemm_rs, hopper_tile, hopper_scheduler):
        monkeypatch.setattr(module, "gl", SimpleNamespace(cdiv=cdiv, static_range=range))
        for name in ("tile_in_groups", "number_in_groups", "steps_of_part"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, getattr(module, name).fn)


def _ag_tiles(shape, world_size, group_m, rank=1):
    rows, columns = shape
    rank %= world_size
    return [
        hopper_ag_gemm.ag_tile.fn(tile, rank, rows, columns, 0, world_size, group_m, PROGRAMS)
        for tile in range(world_size * rows * columns)
    ]


def _rs_tiles(shape, world_size, group_m, rank=1):
    rows, columns = shape
    rank %= world_size
    return [
        hopper_gemm_rs.rs_tile.fn(tile, rank, rows, columns, world_size, group_m)
        for tile in range(world_size * rows * columns)
    ]


@pytest.mark.parametrize("group_m", GROUPS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_tile_is_made_once(shape, world_size, group_m):
    rows, columns = shape
    everything = {
        (rank, m, n) for rank in range(world_size) for m in range(rows) for n in range(columns)
    }
    made = _ag_tiles(shape, world_size, group_m)
    assert len(made) == len(everything)
    assert set(made) == everything
    if world_size > 1:
        made = _rs_tiles(shape, world_size, group_m)
        assert {(owner, m, n) for owner, m, n, _, _ in made} == everything
        places = {(owner, number) for owner, _, _, number, _ in made}
        assert places == {(r, i) for r in range(world_size) for i in range(rows * columns)}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_own_tiles_are_first_where_rows_come_and_last_where_results_go(shape, world_size):
    own = shape[0] * shape[1]
    gathered = [source for source, _, _ in _ag_tiles(shape, world_size, 8)]
    assert set(gathered[:own]) == {1}
    owners = [(owner, step) for owner, _, _, _, step in _rs_tiles(shape, world_size, 8)]
    assert {owner for owner, _ in owners[-own:]} == {1}
    assert all(owner == (1 + 1 + step) % world_size for owner, step in owners)


def test_programs_without_an_own_tile_need_only_the_first_to_arrive():
    for columns, own in ((48, 96), (96, 192)):
        sources = [source for source, _, _ in _ag_tiles((2, columns), 4, 16)]
        full = cdiv(own, PROGRAMS) * PROGRAMS
        assert set(sources[own:full]) == {2}
        assert set(sources[full:]) == {0, 2, 3}


def _cuts() -> list[Cuts]:
    """Of every pattern: many shapes, some with early tiles to cut, a last wave to cut, or both."""
    made = [
        of_pattern(own, world_size, shards, steps, PROGRAMS)
        for of_pattern in (cuts_of_gather, cuts_of_scatter)
        for own in (1, 8, 12, 24, 40, 48, 64, 80, 96, 131, 132, 133, 144, 192)
        for world_size in (2, 3, 4, 8)
        for shards in (0, 1, world_size)
        for steps in (30, 192)
    ]
    return [*dict.fromkeys(made), *(Cuts(own, PROGRAMS) for own in (1, 131, 132, 300))]


CUTS = _cuts()


def _items(cuts: Cuts, steps: int) -> list[tuple[int, ...]]:
    """Of every item: tile, first and last step, part, parts, number of the cut tile."""
    places = (cuts.early_last - cuts.early, cuts.early_last, cuts.split_first)
    return [
        hopper_scheduler.tile_of_work.fn(item, steps, *places, cuts.parts, cuts.split)
        for item in range(cuts.works)
    ]


def test_cuts_are_of_every_kind():
    kinds = {(cuts.early > 0, cuts.rest > 0) for cuts in CUTS}
    assert kinds == {(False, False), (False, True), (True, False), (True, True)}
    assert any(cuts.works < PROGRAMS for cuts in CUTS)
    assert any(cuts.rest * cuts.split > PROGRAMS for cuts in CUTS)  # more than one round


@pytest.mark.parametrize("steps", [64, 192])
def test_parts_cover_every_step_once(steps):
    for cuts in CUTS:
        items = _items(cuts, steps)
        done = sorted((tile, step) for tile, a, b, *_ in items for step in range(a, b))
        assert done == [(tile, step) for tile in range(cuts.tiles) for step in range(steps)]
        assert all((part == 0) == (first == 0) for _, first, _, part, *_ in items)
        assert len(items) == cuts.works
        assert all(parts > 1 or last == steps for _, _, last, _, parts, _ in items)


def test_every_part_that_is_left_has_a_place_of_its_own():
    for cuts in CUTS:
        items = _items(cuts, 64)
        most = max(cuts.parts, cuts.split)
        places = [cut * (most - 1) + part - 1 for *_, part, _, cut in items if part]
        assert len({*places}) == len(places)
        assert all(0 <= place < cuts.partials for place in places)
        counters = {(tile, cut) for tile, *_, parts, cut in items if parts > 1}
        assert len({tile for tile, _ in counters}) == len({cut for _, cut in counters})
        assert all(cut < PARTIAL_COUNTERS for _, cut in counters)


def _waits_for_later_ones(items: list[tuple[int, ...]]) -> list[int]:
    """The items that add up a tile, but come before one of its other parts."""
    last = {tile: place for place, (tile, *_, part, _, _) in enumerate(items) if part}
    return [
        place
        for place, (tile, *_, part, parts, _) in enumerate(items)
        if part == 0 and parts > 1 and last[tile] > place
    ]


def test_items_wait_only_for_parts_that_were_drawn_before():
    for cuts in CUTS:
        assert not _waits_for_later_ones(_items(cuts, 64))
    swapped = [*reversed([(0, 0, 1, 1, 2, 0), (0, 1, 2, 0, 2, 0)])]
    assert _waits_for_later_ones(swapped) == [0]


def test_cut_tiles_give_every_program_own_rows_to_begin_with():
    """The smallest own shard whose programs all find some."""
    for own in (24, 48, 96):
        cuts = cuts_of_gather(own, 4, 1, 192, PROGRAMS)
        assert cuts.early == cuts.early_last == own
        assert all(tile < own for tile, *_ in _items(cuts, 192)[:PROGRAMS])
    assert cuts_of_gather(144, 4, 1, 192, PROGRAMS).early == 0


def test_other_shards_last_tiles_are_made_before_the_last_wave_ends():
    cuts = cuts_of_scatter(96, 4, 1, 192, PROGRAMS)
    assert (cuts.early_last, cuts.early) == (288, 24)
    assert cuts.waves(192) <= cuts_of_scatter(96, 4, 0, 192, PROGRAMS).waves(192)


def test_own_tiles_lie_in_their_number_order():
    for shape in SHAPES:
        numbers = [number for *_, number, step in _rs_tiles(shape, 4, 11) if step == 3]
        assert numbers == sorted(numbers)


@pytest.mark.parametrize("group_m", GROUPS)
@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_host_knows_when_a_communication_tile_is_complete(shape, world_size, group_m):
    tile = replace(hopper_gemm.TILE, group_m=group_m)
    tiles_comm = cdiv(shape[0] * shape[1], 3)
    expected: dict[tuple[int, int], int] = {}
    for place, (_, _, _, number, step) in enumerate(_rs_tiles(shape, world_size, group_m)):
        if step < world_size - 1:
            expected[step, number // tiles_comm] = place
    M_shard, N = shape[0] * tile.block_m, shape[1] * tile.block_n
    assert hopper_gemm.last_made(M_shard, N, world_size, tiles_comm, tile) == expected

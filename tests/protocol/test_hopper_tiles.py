"""The orders in which the Hopper kernels take their tiles, as plain functions of numbers.

The kernels themselves run on GPUs only. What can be proved here: every tile is made once, waits
come in the order of arrival, and host and kernel agree on what a communication tile holds.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from flux_megatron.kernels import hopper_ag_gemm, hopper_gemm, hopper_gemm_rs, hopper_tile
from flux_megatron.kernels.sizes import cdiv

PROGRAMS = 132
SHAPES = [  # tiles of a shard: rows, columns
    (1, 1), (1, 7), (2, 48), (3, 10), (4, 48), (8, 5), (16, 12), (24, 3),
]  # fmt: skip
WORLD_SIZES = [1, 2, 3, 4, 8]
GROUPS = [1, 2, 8, 11, 16]


@pytest.fixture(autouse=True)
def plain_functions(monkeypatch):
    """Jit functions that others call become the Python functions that they were."""
    for module in (hopper_ag_gemm, hopper_gemm_rs, hopper_tile):
        monkeypatch.setattr(module, "gl", SimpleNamespace(cdiv=cdiv, static_range=range))
        for name in ("tile_in_groups", "number_in_groups"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, getattr(hopper_tile, name).fn)


def _ag_tiles(shape, world_size, group_m, rank=1):
    rows, columns = shape
    rank %= world_size
    return [
        hopper_ag_gemm.ag_tile.fn(tile, rank, rows, columns, world_size, group_m, PROGRAMS)
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


@pytest.mark.parametrize("split", [1, 2, 3])
@pytest.mark.parametrize("tiles", [1, 5, 40, 44, 131, 132, 133, 150, 264, 300])
def test_parts_of_the_last_wave_cover_every_step_once(tiles, split):
    steps, rest = 50, tiles % PROGRAMS
    split = min(split, PROGRAMS // rest) if rest else 1
    programs = PROGRAMS if tiles >= PROGRAMS else rest * split
    works = range(hopper_tile.number_of_works.fn(tiles, split, programs))
    items = [hopper_tile.tile_of_work.fn(w, tiles, steps, split, programs) for w in works]
    done = sorted((tile, step) for tile, first, last, _ in items for step in range(first, last))
    assert done == [(tile, step) for tile in range(tiles) for step in range(steps)]
    assert len(items) <= cdiv(tiles, programs) * programs  # no wave more
    assert {tile for tile, _, _, part in items if part == 0} == set(range(tiles))
    for tile, first, _, part in items:
        assert (part == 0) == (first == 0)
        assert part == 0 or tile >= tiles - tiles % programs


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

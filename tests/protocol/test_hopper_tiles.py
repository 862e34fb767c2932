"""The orders in which the Hopper kernels take their tiles, as plain functions of numbers.

The kernels themselves run on GPUs only. What can be proved here: every tile is made once, waits
come in the order of arrival, and host and kernel agree on what a communication tile holds.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from flux_megatron.kernels import launch
from flux_megatron.kernels.hopper import ag_gemm as hopper_ag_gemm
from flux_megatron.kernels.hopper import config as hopper_config
from flux_megatron.kernels.hopper import gathered_rows as hopper_gathered_rows
from flux_megatron.kernels.hopper import gemm as hopper_gemm
from flux_megatron.kernels.hopper import split_k as hopper_split_k
from flux_megatron.kernels.hopper import tile_order as hopper_tile_order
from flux_megatron.kernels.hopper.split_tiles import PARTS_MAX, SplitK, split_last_wave
from flux_megatron.kernels.sizes import cdiv
from flux_megatron.overlap import hopper
from flux_megatron.symm.signals import SPLIT_TILES

SMS = 132
SHAPES = [  # tiles of a shard: rows, columns
    (1, 1), (1, 7), (2, 48), (3, 10), (4, 48), (8, 5), (16, 12), (24, 3),
]  # fmt: skip
WORLD_SIZES = [1, 2, 3, 4, 8]
GROUPS = [1, 2, 8, 11, 16]


@pytest.fixture(autouse=True)
def plain_functions(monkeypatch):
    """Jit functions that others call become the Python functions that they were."""
    for module in (hopper_tile_order, hopper_split_k, hopper_gathered_rows):
        monkeypatch.setattr(module, "gl", SimpleNamespace(cdiv=cdiv, static_range=range))
        for name in ("tile_in_groups", "number_in_groups"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, getattr(module, name).fn)
    monkeypatch.setattr(hopper_split_k, "WorkTile", lambda *fields: fields)
    monkeypatch.setattr(hopper_split_k, "PARTS_MAX", PARTS_MAX)
    for module in (hopper_split_k, hopper_gathered_rows):
        monkeypatch.setattr(module, "uniform", lambda value: value)


def _grid(shape, world_size, group_m, rank) -> SimpleNamespace:
    rows, columns = shape
    return SimpleNamespace(
        rows=rows, columns=columns, rank=rank % world_size, WORLD_SIZE=world_size, GROUP_M=group_m
    )


def _ag_tiles(shape, world_size, group_m, rank=1, ctas=SMS):
    grid = _grid(shape, world_size, group_m, rank)
    tiles = SimpleNamespace(ctas=ctas)
    return [
        hopper_tile_order.ag_tile.fn(tile, grid, tiles)
        for tile in range(world_size * grid.rows * grid.columns)
    ]


def _rs_tiles(shape, world_size, group_m, rank=1):
    grid = _grid(shape, world_size, group_m, rank)
    return [
        hopper_tile_order.rs_tile.fn(tile, grid)
        for tile in range(world_size * grid.rows * grid.columns)
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


@pytest.mark.parametrize("behind", [1, 3])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_remote_and_local_tiles_take_turns(shape, world_size, behind):
    """A local tile comes when the remote ones of `behind` more communication tiles are made, and
    numbers of a shard count up, as copy engines push them.
    """
    grid, tiles_comm = _grid(shape, world_size, 4, 1), 3
    per_shard = grid.rows * grid.columns
    made = [
        hopper_tile_order.tile_in_turns.fn(tile, tiles_comm, behind, grid)
        for tile in range(world_size * per_shard)
    ]
    places = {(owner, m, n) for owner, m, n, _, _ in made}
    assert len(places) == len(made) == world_size * per_shard
    assert {*made} == {*_rs_tiles(shape, world_size, 4)}
    for rank in range(world_size):
        assert [number for owner, *_, number, _ in made if owner == rank] == [*range(per_shard)]
    in_turns = [*hopper._in_turns(world_size, cdiv(per_shard, tiles_comm), behind)]
    assert [*dict.fromkeys((hops, number // tiles_comm) for *_, number, hops in made)] == in_turns
    first_local = next(place for place, tile in enumerate(made) if tile[0] == 1)
    assert first_local == min((behind + 1) * tiles_comm, per_shard) * (world_size - 1)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_local_tiles_are_first_where_rows_come_and_last_where_results_go(shape, world_size):
    local = shape[0] * shape[1]
    gathered = [source for source, _, _ in _ag_tiles(shape, world_size, 8)]
    assert set(gathered[:local]) == {1}
    owners = [(owner, hops) for owner, _, _, _, hops in _rs_tiles(shape, world_size, 8)]
    assert {owner for owner, _ in owners[-local:]} == {1}
    assert all(owner == (1 + 1 + hops) % world_size for owner, hops in owners)


def test_ctas_without_a_local_tile_need_only_the_first_to_arrive():
    for columns, local in ((48, 96), (96, 192)):
        sources = [source for source, _, _ in _ag_tiles((2, columns), 4, 16)]
        full = cdiv(local, SMS) * SMS
        assert set(sources[local:full]) == {2}
        assert set(sources[full:]) == {0, 2, 3}


def _waits_and_loads(source: int, rank: int, world_size: int, k_parts: int) -> list[str]:
    """Of a work tile of `source` that begins in the second of `k_parts` parts, in order."""
    done: list[str] = []

    def await_once(arrived, waited, part, parts, deadline):
        done.append(f"wait {waited} {part}")
        return arrived

    def load_tile(x, *_):
        done.append(f"load {x}")
        return 0, 0

    sizes = SimpleNamespace(
        rank=rank, WORLD_SIZE=world_size, M_shard=64, BLOCK_M=64, K=64, BLOCK_K=8
    )
    rows = SimpleNamespace(
        sizes=sizes, K_PARTS=k_parts, comm_rows=32, signals=SimpleNamespace(await_once=await_once),
        x_desc="own rows", gathered_desc="gathered rows", w_desc="w",
    )  # fmt: skip
    for name in ("_await_others", "_load_parts"):
        setattr(rows, name, partial(getattr(hopper_gathered_rows.GatheredRows, name).fn, rows))
    ring = SimpleNamespace(load_tile=load_tile, load_k_tiles=lambda *_: 0)
    work = SimpleNamespace(tile=0, first=3, last=8, behind=lambda k_tiles: None)
    load = hopper_gathered_rows.GatheredRows.load.fn
    scheduler = SimpleNamespace(words=None)
    load(rows, ring, scheduler, work, source, 64 * source, 0, 0, 0, 0)
    return done


def test_tiles_of_a_column_begin_together_where_rows_come_in_parts():
    """Those of local rows wait too, else L2 loses what they have read of w."""
    assert _waits_and_loads(1, 1, 3, 4) == ["wait 2 1", "wait 0 1", "load own rows"]
    assert _waits_and_loads(1, 1, 3, 1) == ["load own rows"]
    in_parts = _waits_and_loads(2, 1, 3, 4)
    assert in_parts == ["wait 2 1", "wait 2 2", "wait 2 3", "load gathered rows"]
    assert _waits_and_loads(2, 1, 3, 1) == ["wait 2 1", "load gathered rows"]


def _splits() -> list[SplitK]:
    """Of many shapes, and of none."""
    made = [
        split_last_wave(shard_tiles * world_size, k_tiles, SMS, tile)
        for shard_tiles in (1, 8, 12, 24, 40, 48, 64, 80, 96, 131, 132, 133, 144, 192)
        for world_size in (1, 2, 3, 4, 8)
        for k_tiles in (30, 67, 192)
        for tile in (hopper_config.DEEP, hopper_config.LOW[0])
    ]
    return [*dict.fromkeys(made), *(SplitK(tiles, SMS) for tiles in (1, 131, 132, 300))]


SPLITS = _splits()


def _work_tiles(split: SplitK, k_tiles: int) -> list[tuple[int, ...]]:
    """Of every work tile: tile, first and last k-tile, part, parts, number of the split tile."""
    tiles = SimpleNamespace(
        first_part=split.first_part, parts=split.parts, cuts=split.numbers(k_tiles)[3:], SPLITS=True
    )
    locate = hopper_split_k.WorkTiles.locate.fn
    return [locate(tiles, work, k_tiles) for work in range(split.work_tiles)]


def test_splits_are_of_every_kind():
    assert {split.parts for split in SPLITS} == {*range(1, PARTS_MAX + 1)}
    assert {split.first_part > 0 for split in SPLITS if split.parts > 1} == {False, True}
    assert any(split.work_tiles < SMS for split in SPLITS)
    assert any(split.split_tiles * split.parts > SMS for split in SPLITS)  # several rounds


@pytest.mark.parametrize("k_tiles", [64, 67, 192])
def test_parts_cover_every_k_tile_once(k_tiles):
    for split in SPLITS:
        works = _work_tiles(split, k_tiles)
        done = sorted((tile, k_tile) for tile, a, b, *_ in works for k_tile in range(a, b))
        assert done == [(tile, k_tile) for tile in range(split.tiles) for k_tile in range(k_tiles)]
        assert all((part == 0) == (first == 0) for _, first, _, part, *_ in works)
        assert len(works) == split.work_tiles
        assert all(parts > 1 or last == k_tiles for _, _, last, _, parts, _ in works)
        whole = [tile for tile, *_, parts, _ in works if parts == 1]
        assert whole == [*range(split.first_part)]


def test_every_partial_has_a_place_of_its_own():
    for split in SPLITS:
        works = _work_tiles(split, 64)
        places = [number * (parts - 1) + part - 1 for *_, part, parts, number in works if part]
        assert len({*places}) == len(places)
        assert all(0 <= place < split.partials for place in places)
        counters = {(tile, number) for tile, *_, parts, number in works if parts > 1}
        assert len({tile for tile, _ in counters}) == len({number for _, number in counters})
        assert all(number < SPLIT_TILES for _, number in counters)


def _waits_for_later_ones(works: list[tuple[int, ...]]) -> list[int]:
    """The work tiles that fix up a tile, but come before one of its other parts."""
    last = {tile: place for place, (tile, *_, part, _, _) in enumerate(works) if part}
    return [
        place
        for place, (tile, *_, part, parts, _) in enumerate(works)
        if part == 0 and parts > 1 and last[tile] > place
    ]


def test_work_tiles_wait_only_for_parts_that_were_drawn_before():
    for split in SPLITS:
        assert not _waits_for_later_ones(_work_tiles(split, 64))
    swapped = [*reversed([(0, 0, 1, 1, 2, 0), (0, 1, 2, 0, 2, 0)])]
    assert _waits_for_later_ones(swapped) == [0]


@pytest.mark.parametrize(("tiles", "k_tiles"), [(1280, 200), (360, 216)])
def test_no_tile_is_cut_into_three_rounds_of_parts(tiles, k_tiles):
    """8192 x 5120 x 12800 and 2304 x 5120 x 13824: 92 and 96 tiles more than whole waves."""
    assert split_last_wave(tiles, k_tiles, SMS, hopper_config.TILE) == SplitK(tiles, SMS)


def test_low_tiles_are_not_cut_into_two_rounds_of_parts():
    """80 tiles of 128 k-tiles, as of 128 x 5120 x 8192; 40 of them are one round of thirds."""
    wide, low = hopper_config.DEEP, hopper_config.LOW[0]
    assert split_last_wave(80, 128, SMS, wide).parts == 3
    assert split_last_wave(80, 128, SMS, low).parts == 1
    assert split_last_wave(40, 128, SMS, low).parts == 3


def test_tiles_that_make_the_same_rows_are_not_split(monkeypatch):
    """Those that end a ragged shard, and those before: their sums must have one order."""
    monkeypatch.setattr(launch, "sms", lambda device: SMS)
    names = hopper_ag_gemm.hopper_ag_gemm_kernel.arg_names
    for M_shard, row_limit, parts in ((256, hopper_ag_gemm.NO_LIMIT, 4), (200, 72, 1)):
        given = (M_shard, 1280, 8192, 2, torch.device("cuda", 0), hopper_config.DEEP)
        split, sizes = hopper_ag_gemm._sizes(*given)
        first = names.index("M_shard")
        numbers = dict(zip(names[first : first + len(sizes)], sizes, strict=True))
        assert (numbers["row_limit"], numbers["parts"]) == (row_limit, parts)
        assert (split.partials > 0) == (parts > 1)


def test_local_tiles_lie_in_their_number_order():
    for shape in SHAPES:
        numbers = [number for *_, number, hops in _rs_tiles(shape, 4, 11) if hops == 3]
        assert numbers == sorted(numbers)


@pytest.mark.parametrize("group_m", GROUPS)
@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_host_knows_when_each_tile_is_made(shape, world_size, group_m):
    tile = replace(hopper_config.TILE, group_m=group_m)
    M_shard, N = shape[0] * tile.block_m, shape[1] * tile.block_n
    made = {
        (hops, number): place
        for place, (_, _, _, number, hops) in enumerate(_rs_tiles(shape, world_size, group_m))
        if hops < world_size - 1
    }
    told = {
        (hops, number): hopper_gemm.made_at(hops, number, M_shard, N, world_size, tile)
        for hops in range(world_size - 1)
        for number in range(shape[0] * shape[1])
    }
    assert told == made

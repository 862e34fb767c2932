"""How many registers a thread of the kernels of few rows gets, and how many CTAs a gather has."""

from unittest import mock

import pytest
import torch

from flux_megatron.kernels import launch
from flux_megatron.kernels.few_rows import ag_gemv
from flux_megatron.kernels.few_rows.words import registers_of
from flux_megatron.kernels.triton_launch import launch_kernel
from flux_megatron.problem import Tile

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(launch, "sms", lambda device: 132)


def tile(rows: int, columns: int, depth: int, stages: int, warps: int = 4) -> Tile:
    return Tile(rows, columns, depth, num_warps=warps, num_stages=stages)


@pytest.mark.parametrize(
    ("of", "work_tiles", "expected"),
    [
        (tile(32, 64, 128, 5), 128, 255),  # one CTA an SM
        (tile(16, 32, 128, 5), 264, 255),  # two, of 48 KiB
        (tile(16, 32, 128, 5), 265, 168),  # three
        (tile(16, 64, 64, 5), 448, 128),  # four, of 40 KiB: 28672 columns
        (tile(32, 64, 64, 5), 4000, 128),  # no more than four of 48 KiB fit
        (tile(16, 64, 128, 5), 4000, 255),  # nor than two of 80 KiB
        (tile(16, 64, 64, 5, warps=8), 448, 64),
    ],
)
def test_as_many_as_leave_room_for_the_ctas(of, work_tiles, expected):
    assert registers_of(of, work_tiles, "nt", torch.bfloat16, GPU) == expected


@pytest.mark.parametrize(
    ("rows", "layout", "dtype", "device", "capability"),
    [
        (64, "nt", torch.bfloat16, GPU, (9, 0)), (32, "nn", torch.bfloat16, GPU, (9, 0)),
        (32, "nt", torch.float32, GPU, (9, 0)), (32, "nt", torch.bfloat16, GPU, (8, 0)),
        (32, "nt", torch.bfloat16, torch.device("cpu"), (9, 0)),
    ],
)  # fmt: skip
def test_else_the_compiler_chooses(rows, layout, dtype, device, capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert registers_of(tile(rows, 64, 128, 5), 128, layout, dtype, device) == 0


@pytest.mark.parametrize(
    ("M_shard", "N", "K", "ctas"),
    [
        (16, 8192, 14336, 132),  # 224 pieces, 128 tiles: one CTA an SM
        (16, 2560, 14336, 132),  # 40 tiles: the pieces have all SMs
        (8, 2560, 2048, 40),  # 16 pieces, 40 tiles
        (16, 28672, 8192, 448),  # several CTAs an SM, a tile for each
    ],
)
def test_a_gather_has_ctas_for_its_tiles_or_one_an_sm(M_shard, N, K, ctas):
    shapes = (M_shard, K), (2 * M_shard, K), (N, K)
    x, gathered, w = (torch.empty(s, dtype=torch.bfloat16, device="meta") for s in shapes)
    channel = dict.fromkeys(("word_pointers", "epochs", "work", "arrivals", "counters", "status"))
    with mock.patch.object(ag_gemv, "launch_kernel") as launched:
        ag_gemv.ag_gemv(
            x, gathered, w, None, **channel, half_words=0, rank=0, timeout_ns=0, layout="nt",
            tile=tile(16, 64, 128, 5),
        )  # fmt: skip
    assert launched.call_args.args[1] == (ctas,)


@pytest.mark.parametrize(("M_shard", "columns"), [(1, 2048), (32, 64), (33, 64), (64, 64)])
def test_pieces_of_many_rows_are_larger(M_shard, columns):
    assert ag_gemv.piece_columns(M_shard, 2, 8192, 2) == columns


def test_a_launch_says_how_many():
    kernel = mock.MagicMock(arg_names=["x"], params=[mock.Mock()], __name__="stand_in_kernel")
    kernel[(1,)].return_value = None
    for limit in (0, 168):
        launch_kernel(kernel, (1,), Tile(), [torch.zeros(1)], registers=limit)
        assert kernel[(1,)].call_args.kwargs.get("maxnreg", 0) == limit

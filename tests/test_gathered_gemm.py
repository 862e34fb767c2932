"""`gathered_gemm` alone: which bands one launch multiplies, and what it leaves to the next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from closeness import assert_exact
from ranks import DEVICE, here
from torch import Tensor

from flux_megatron.kernels.hopper import config as hopper_config
from flux_megatron.kernels.hopper import gemm as hopper_gemm
from flux_megatron.kernels.portable import gathered_gemm as portable
from flux_megatron.kernels.portable.signalled_gemm import Band, bands, table_of
from flux_megatron.problem import Tile

SMALL = Tile(16, 16, 16, group_m=2)
LONG_US = 10**5


class Call(NamedTuple):
    """Of rank 1 of 3: x and blocks of integers, y of NaN, and the gathered rows by rank."""

    kernel: Any
    tile: Tile
    of_bands: tuple[Band, ...]
    x: Tensor
    blocks: Tensor
    w: Tensor
    y: Tensor
    words: Tensor
    gathered: Tensor

    def launch(self, step_us: int) -> None:
        table = table_of(self.of_bands, self.x.device)
        self.kernel(
            self.x, self.blocks, self.w, None, self.y, table=table, words=self.words, rank=1,
            bands=len(self.of_bands), step_us=step_us, spare_sms=8, layout="nt", tile=self.tile,
        )  # fmt: skip

    def flag(self, band: int) -> None:
        self.words[portable.FLAGS + band] = 1

    def block(self, number: int) -> slice:
        band = self.of_bands[number - 1]
        return slice(3 * band.first, 3 * (band.first + band.rows))

    def check(self, *done: int) -> None:
        """The local shard and these bands are exact, nothing of the others is there."""
        expected = (self.gathered @ self.w.t().float()).to(self.y.dtype).float()
        expected = expected.view(3, len(self.x), -1)
        y = self.y.float().view(expected.shape)
        assert_exact(y[1], expected[1])
        for number, band in enumerate(self.of_bands, 1):
            rows = slice(band.first, band.first + band.rows)
            if number in done:
                assert_exact(y[[0, 2], rows], expected[[0, 2], rows])
            else:
                assert y[[0, 2], rows].isnan().all(), number


def call_of(hopper: bool, rows: tuple[int, ...], N: int, K: int) -> Call:
    kernel, tile, dtype = portable.gathered_gemm, SMALL, torch.float32
    if hopper:
        kernel = pytest.importorskip("flux_megatron.kernels.hopper.gathered_gemm").gathered_gemm
        tile, dtype = replace(hopper_config.TILE, group_m=16), torch.bfloat16
    made = bands(sum(rows), N, 3, rows[:-1], tile)
    if hopper and (reason := hopper_gemm.refuses_gathered(DEVICE, dtype, K, N, made, tile)):
        pytest.skip(reason)
    given = torch.Generator().manual_seed(0)
    gathered = torch.randint(-2, 3, (3, sum(rows), K), generator=given)
    blocks = torch.cat([gathered[:, b.first : b.first + b.rows].flatten(0, 1) for b in made])
    w = torch.randint(-2, 3, (N, K), generator=given).to(here(), dtype)
    y = torch.full((3 * sum(rows), N), torch.nan, device=here(), dtype=dtype)
    words = torch.zeros(portable.WORDS, dtype=torch.int32, device=here())
    return Call(
        kernel, tile, made, gathered[1].to(here(), dtype), blocks.to(here(), dtype), w, y, words,
        gathered.flatten(0, 1).to(here()).float(),
    )  # fmt: skip


ON_GPU = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
KINDS = pytest.mark.parametrize("hopper", [False, True])


@KINDS
def test_what_has_not_come_is_left_to_the_next_launch(hopper):
    rows = (128, 256, 165) if hopper else (16, 21, 5)
    call = call_of(hopper, rows, 528 if hopper else 40, 200 if hopper else 24)
    call.launch(0)
    call.check()
    call.flag(1)
    call.flag(3)  # nobody looks behind a band that has not come
    call.launch(0)
    call.check(1)
    call.flag(2)
    call.launch(0)
    call.check(1, 2, 3)
    call.y.fill_(torch.nan)  # and no tile is made twice
    call.launch(0)
    assert call.y.isnan().all()


@ON_GPU
@KINDS
def test_rows_that_a_stream_brings_and_marks(hopper):
    """One launch waits for each band, though its first CTA leaves at once, and multiplies what the
    flag announces, not what was there before: in small and in large matrices, time and again.
    """
    stream = torch.cuda.Stream(priority=-1)
    for rows, N, K in (((128, 128, 128, 257), 528, 200), ((256, 512, 256), 4096, 4096)):
        call = call_of(hopper, rows, N, K)
        brought = call.blocks.clone()
        for turn in range(20):
            call.words.zero_()
            call.blocks.fill_(torch.nan)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for number in range(1, len(rows) + 1):
                    torch.cuda._sleep(turn % 4 * 50_000)
                    call.blocks[call.block(number)] = brought[call.block(number)]
                    call.flag(number)
            call.launch(LONG_US)
            torch.cuda.current_stream().wait_stream(stream)
            call.check(*range(1, len(rows) + 1))
            call.y.fill_(torch.nan)


@ON_GPU
@KINDS
def test_all_ctas_leave_in_the_end(hopper):
    """The flag comes behind the launch in its own stream, so it would never end."""
    call = call_of(hopper, (128, 128), 528, 200)
    call.flag(1)
    call.launch(10)
    call.flag(2)
    call.check(1)
    assert call.words[portable.WAITED] >= 10
    call.launch(0)
    call.check(1, 2)

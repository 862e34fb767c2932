"""GEMMs alone, on one GPU: our kernel with each of its tiles, beside the library, and beside quack
where it is installed.

    python tests/gpu/gemm_tiles.py gemm_tiles.jsonl --tp 4
    python tests/gpu/gemm_tiles.py gemm_tiles.jsonl --shapes "6144x3584x4096 nt" --groups 4,8,24

Every tile is first verified on small whole numbers, every bit; then all of a shape race on random
ones. Timed is a CUDA graph of calls one after another, each with another weight, so many that L2
does not hold them, as in a model of many layers. The shapes are those of the models' layers, unless
`--shapes` names others; with `--groups` the tiles of 192 and 256 columns are made in groups of so
many rows of tiles too. A line a shape: the library's us, each tile's share of its speed, the
fastest first, and an asterisk at the tile that `gather_tiles.tile_alone` chooses.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer
from torch import Tensor

from flux_megatron.bench import suites
from flux_megatron.bench.candidates import replayed
from flux_megatron.bench.competitors import quack
from flux_megatron.kernels import hopper_gemm
from flux_megatron.kernels.hopper_config import DEEP, LONG, MEDIUM, TILES
from flux_megatron.kernels.sizes import cdiv
from flux_megatron.patterns import COLUMN
from flux_megatron.problem import Problem, Tile
from flux_megatron.tuning import environment
from flux_megatron.tuning.gather_tiles import tile_alone
from flux_megatron.tuning.timing import race

NAMED = {f"{tile.block_m}x{tile.block_n}": tile for tile in TILES}
NAMED["128x256, groups of 8"] = replace(DEEP, group_m=8)
NAMED["128x256, 3 stages"] = LONG
L2_BYTES = 50 << 20  # of an H100 or H200
Multiply = Callable[[Tensor], Tensor]  # x by this weight


@dataclass(frozen=True)
class Shape:
    M: int
    N: int
    K: int
    layout: str

    @staticmethod
    def of(text: str) -> Shape:
        """ "M x N x K layout", without the spaces around x."""
        sizes, layout = text.split()
        return Shape(*map(int, sizes.split("x")), layout)

    def __str__(self) -> str:
        return f"{self.M}x{self.N}x{self.K} {self.layout}"


def shapes_of_models(tp: int, Ms: tuple[int, ...]) -> list[Shape]:
    """Each size once."""
    cases = [case for model in suites.MODELS for case in suites.cases(model, "gemm", Ms, tp)]
    return [*dict.fromkeys(Shape(one.M, one.N, one.K, one.layout) for one in cases)]


def in_groups(sizes: tuple[int, ...]) -> dict[str, Tile]:
    """The tiles that are made in groups of so many rows of tiles, by their names."""
    return {
        f"128x{tile.block_n}, groups of {size}": replace(tile, group_m=size)
        for tile in (MEDIUM, DEEP)
        for size in sizes
    }


class Operands:
    """x [M, K] and weights of whole numbers, of whose products bf16 has every sum."""

    def __init__(
        self, shape: Shape, device: torch.device, dtype: torch.dtype, groups: tuple[int, ...] = ()
    ) -> None:
        self.shape, self.tiles = shape, NAMED | in_groups(groups)
        made = torch.Generator(device).manual_seed(1)

        def whole(*size: int) -> Tensor:
            drawn = torch.randint(-8, 9, size, generator=made, device=device)
            return (drawn.sign() * (drawn.abs() == 8)).to(dtype)

        M, N, K = shape.M, shape.N, shape.K
        weights = 1 + cdiv(4 * L2_BYTES, N * K * dtype.itemsize) if device.type == "cuda" else 2
        self.x = whole(M, K)
        self.ws = [whole(*((N, K) if shape.layout == "nt" else (K, N))) for _ in range(weights)]

    def renew(self) -> None:
        """Random numbers: of few ones a GEMM draws less power, and is faster than in training."""
        for tensor in (self.x, *self.ws):
            tensor.normal_()

    def library(self, w: Tensor) -> Tensor:
        return self.x @ (w.t() if self.shape.layout == "nt" else w)

    def candidates(self, device: torch.device) -> dict[str, Multiply]:
        """The library is first. Without a Hopper GPU there is no other."""
        M, N, K = self.shape.M, self.shape.N, self.shape.K
        dtype = str(self.x.dtype).removeprefix("torch.")
        alone = Problem(COLUMN, M, N, K, dtype, 1, self.shape.layout, device.type)
        if reason := hopper_gemm.supports(alone):
            print(reason, flush=True)
            return {"library": self.library}
        from flux_megatron.kernels.hopper_ag_gemm import gemm

        layout = self.shape.layout
        ours = {
            name: lambda w, tile=tile: gemm(self.x, w, layout, tile)
            for name, tile in self.tiles.items()
        }
        return {"library": self.library, **ours}

    def peers(self) -> dict[str, Multiply]:
        """quack's GEMM with each of the tiles that the benchmark gives it."""
        if quack.QuackGemm().unavailable():
            return {}

        def right(w: Tensor) -> Tensor:
            return w.t() if self.shape.layout == "nt" else w

        return {
            f"quack {tile}": lambda w, tile=tile: quack.gemm(self.x, right(w), tile)
            for tile in quack.TILES
        }


def compiled(shape: Shape, groups: tuple[int, ...] = ()) -> None:
    """Every kernel of a shape: Triton keeps them on disk, for the process that measures."""
    device = torch.device("cuda", 0)
    operands = Operands(shape, device, torch.bfloat16, groups)
    for call in operands.candidates(device).values():
        call(operands.ws[0])
    torch.cuda.synchronize()


def raced(
    operands: Operands, calls: dict[str, Multiply], device: torch.device, rounds: int
) -> Iterator[dict]:
    """What a row has of each candidate, the first of which is the library. `ArithmeticError` if one
    is wrong.
    """
    shape, first, weights = operands.shape, operands.ws[0], len(operands.ws)
    expected = operands.library(first)
    for name, call in calls.items():
        if wrong := int((call(first) != expected).sum()):
            raise ArithmeticError(f"{shape} with tiles of {name}: {wrong} numbers are wrong")
    operands.renew()
    group = dist.group.WORLD
    assert group is not None

    def with_each(call: Multiply) -> Callable[[], object]:
        def calls() -> tuple[Tensor, ...]:
            for w in operands.ws:
                result = call(w)
            return (result,)

        return replayed(calls) if device.type == "cuda" else calls

    timed = {name: with_each(call) for name, call in calls.items()}
    result = race(timed, group=group, device=device, rounds=rounds)
    for name, said in result.failures.items():
        raise RuntimeError(f"{shape} with tiles of {name}: {said}")
    machine = asdict(environment.of(device))
    for name, times_us in result.times_us.items():
        yield {
            **asdict(shape), "tile": name, "weights": weights,
            "median_us": round(result.median_us(name) / weights, 2),
            "times_us": [round(t / weights, 2) for t in times_us],
            "date": time.strftime("%Y-%m-%d"),
            **{key: machine[key] for key in ("gpu", "driver", "cuda", "torch", "triton")},
        }  # fmt: skip


def measure(
    shape: Shape, device: torch.device, rounds: int, dtype: torch.dtype = torch.bfloat16,
    groups: tuple[int, ...] = (),
) -> Iterator[dict]:  # fmt: skip
    """A row for each candidate."""
    operands = Operands(shape, device, dtype, groups)
    calls = {**operands.candidates(device), **operands.peers()}
    chosen = tile_alone(shape.M, shape.N, shape.K, dtype, shape.layout) if len(calls) > 1 else None
    for row in raced(operands, calls, device, rounds):
        name = row["tile"]
        yield {
            "table": "gemm_tiles", **row,
            "candidate": name.split()[0] if name not in operands.tiles else "ours",
            "chosen": chosen is not None and operands.tiles.get(name) == chosen,
        }  # fmt: skip


def line(rows: list[dict], marked: str = "chosen") -> str:
    """An asterisk at the tile that is `marked`."""
    shape = Shape(*(rows[0][key] for key in ("M", "N", "K", "layout")))
    library = rows[0]["median_us"]
    shares = [
        f"{row['tile']}{'*' * row[marked]} {library / row['median_us']:.3f}"
        for row in sorted(rows[1:], key=lambda row: row["median_us"])
    ]
    return f"{shape!s:22} {library:8.1f} us   {'   '.join(shares)}"


def start() -> torch.device:
    """The first GPU, of a group of one rank."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    return device


def main(
    out: Path, tp: int = 4, ms: str = "64,128,256,512,1024,2048,4096,8192", shapes: str = "",
    rounds: int = 16, seconds: float = 200, commit: str = "", compilers: int = 12,
    groups: str = "",
) -> None:  # fmt: skip
    """Measure on the first GPU until `seconds` are over, and append the rows to `out`."""
    end = time.monotonic() + seconds
    device = start()
    print(quack.QuackGemm().unavailable() or "quack takes part", flush=True)
    Ms, sizes = (tuple(map(int, text.split(","))) if text else () for text in (ms, groups))
    wanted = [*map(Shape.of, shapes.split(","))] if shapes else shapes_of_models(tp, Ms)
    with ProcessPoolExecutor(compilers, mp_context=mp.get_context("spawn")) as pool:
        [*pool.map(partial(compiled, groups=sizes), wanted)]
    with out.open("a") as file:
        for shape in wanted:
            if time.monotonic() > end:
                print("no time for the others")
                break
            rows = [
                {**row, "commit": commit} for row in measure(shape, device, rounds, groups=sizes)
            ]
            file.writelines(json.dumps(row) + "\n" for row in rows)
            print(line(rows), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)

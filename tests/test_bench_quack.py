"""quack as a peer, with a stand-in of its modules: ranks of the CPU have no CuTe DSL."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from bench_run import run_here
from ranks import DEVICE, on_cpu_ranks

from flux_megatron.lab.bench import records, runner, suites
from flux_megatron.lab.bench.competitors import quack
from flux_megatron.lab.bench.competitors.quack import TILES, Quack, Tile
from flux_megatron.lab.bench.forward import Forward
from flux_megatron.lab.bench.options import Options

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="needs interpreted kernels")


class Arguments(NamedTuple):
    """quack's AllGatherArguments."""

    flags: torch.Tensor
    epoch: torch.Tensor
    num_shards: int
    first_shard: int


class Runner:
    """quack's AllGatherRunner: gathers at once, and counts its kind."""

    made = 0

    def __init__(self, shard_m, k, dtype, group=None, device=None):
        assert group is dist.group.WORLD, "0.6.5 has no other"
        Runner.made += 1
        self.shape, self.dtype, self.group = (shard_m, k), dtype, group

    @contextmanager
    def gather(self, shard):
        assert (shard.shape, shard.dtype) == (self.shape, self.dtype)
        gathered = shard.new_empty(self.group.size() * shard.shape[0], shard.shape[1])
        dist.all_gather_into_tensor(gathered, shard, group=self.group)
        yield gathered, Arguments(None, None, self.group.size(), self.group.rank())


def installed(monkeypatch, broken=()):
    """Stand-ins in sys.modules; tiles of `broken` do not compile. Gives the tiles that ran."""
    ran = []

    def gemm(A, B, D, C, semaphore, tile_M, tile_N, cluster_M, cluster_N, pingpong=False,
             ag_args=None):  # fmt: skip
        tile = Tile(tile_M, tile_N, cluster_M, pingpong)
        if tile in broken:
            raise RuntimeError(f"no {tile}")
        if ag_args is not None:
            assert A.shape[0] // ag_args.num_shards % tile.rows == 0
            if ag_args.flags is not None:  # open gates
                assert (ag_args.flags >= ag_args.epoch).all()
                assert ag_args.flags.numel() == ag_args.num_shards
        assert B.shape == (D.shape[1], A.shape[1])
        torch.mm(A, B.t(), out=D)
        ran.append(tile)

    contents = {
        "quack": {},
        "quack.gemm": {"gemm": gemm, "AllGatherArguments": Arguments},
        "quack.distributed": {"AllGatherRunner": Runner},
    }
    for name, things in contents.items():
        module = ModuleType(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None), []
        vars(module).update(things)
        monkeypatch.setitem(sys.modules, name, module)
    return ran


def of_case(pattern="ag_gemm", M=512):
    (case, *_) = suites.cases("llama2-70b", pattern, (M,), 2, scale=512)
    return case


def _rows(case):
    """The rows of a tiny race in which only quack takes part."""
    options = Options((case.suite,), (case.pattern,), (case.M,), ("quack",), out="")
    (rows,) = runner.measure(case, options, run_here(scale=512), {Quack(): None})
    return {row.candidate: row for row in rows}


def assert_without(rows, reason):
    """quack has no times, for this reason; the others have."""
    assert rows["quack"].status == records.FAILED
    assert reason in rows["quack"].reason
    assert rows["serial"].status == records.OK


@on_cpu_ranks(2)
def test_rows_of_quack(rank):
    ran = installed(pytest.MonkeyPatch())
    row = _rows(of_case())["quack"]
    assert (row.role, row.status, row.reason) == (records.COMPETITOR, records.OK, "")
    assert len(row.times_us) == 12
    assert {*ran} == {*TILES}
    assert "quack" not in _rows(of_case("gemm_rs"))


@on_cpu_ranks(2)
def test_tiles_that_span_shards_are_left_out(rank):
    ran = installed(pytest.MonkeyPatch())
    _rows(of_case(M=256))  # shards of 128 rows
    assert {*ran} == {tile for tile in TILES if 128 % tile.rows == 0} != {*TILES}


@on_cpu_ranks(2)
def test_shards_that_no_tile_fits(rank):
    installed(pytest.MonkeyPatch())
    said = "shards of 32 rows given, a multiple of 64 expected"
    assert_without(_rows(of_case(M=64)), said)


@on_cpu_ranks(2)
def test_a_tile_that_one_rank_cannot_compile_is_left_out_on_all(rank):
    installed(pytest.MonkeyPatch(), TILES[:4] if rank else ())
    assert _rows(of_case())["quack"].status == records.OK
    installed(pytest.MonkeyPatch(), TILES if rank else ())
    assert_without(_rows(of_case()), f"no {TILES[0]}")


@on_cpu_ranks(2)
def test_one_runner_a_shape(rank):
    installed(pytest.MonkeyPatch())
    Runner.made, peer = 0, Quack()
    for M in (512, 512, 256, 256):
        peer.build(Forward(of_case(M=M), dist.group.WORLD, CPU, torch.float32))
    assert Runner.made == 2


def test_why_it_is_unavailable(monkeypatch):
    monkeypatch.setattr(quack.util, "find_spec", lambda name: None)
    assert Quack().unavailable() == "quack-kernels is not installed"
    monkeypatch.undo()
    installed(monkeypatch)
    for there, capability in ((False, (9, 0)), (True, (8, 0))):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda one=capability: one)
        assert "compute capability 9.0" in Quack().unavailable()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", raising=False)
    assert "TORCH_SYMM_MEM_DISABLE_MULTICAST=1 expected" in Quack().unavailable()
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    assert Quack().unavailable() is None
    monkeypatch.setitem(sys.modules, "quack.distributed", None)  # as before 0.6
    assert "quack.distributed cannot be imported: ModuleNotFoundError" in Quack().unavailable()

"""`signalled`: exact against the reference, in bands of any size, also between nodes."""

import time
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import Case, check_all
from closeness import assert_exact
from layer_cases import check, layer
from ranks import DEVICE, OWN_GPUS, here, on_cpu_ranks, on_device, on_device_ranks

import flux_megatron
from flux_megatron import errors, ops, pieces
from flux_megatron.kernels.hopper import config as hopper_config
from flux_megatron.kernels.hopper import gemm as hopper_gemm
from flux_megatron.kernels.portable.signalled_gemm import bands, ends_of
from flux_megatron.kernels.triton_launch import Launcher
from flux_megatron.overlap import (
    calls,
    collectives,
    gathered_bands,
    registry,
    sequential,
    signalled,
)
from flux_megatron.overlap import stage as stages
from flux_megatron.patterns import ROW, Pattern
from flux_megatron.problem import MAX_GROUPS, Plan, Problem, Tile
from flux_megatron.symm import places
from flux_megatron.symm.workspaces import workspace

SMALL = Tile(16, 16, 16, group_m=2)
# M_shard, N, K_local: whole tiles, ragged tiles, less than a tile
WHOLE, RAGGED, FEW = (32, 32, 16), (37, 21, 9), (3, 5, 7)
GROUPS = [
    (WHOLE, ()), (WHOLE, (16,)), (WHOLE, (7, 16)), (RAGGED, ()), (RAGGED, (16,)), (RAGGED, (7, 16)),
    (FEW, (16,)), (FEW, (1,)), (FEW, (1,) * (MAX_GROUPS - 1)),
]  # fmt: skip


def cases(every: int) -> list[Case]:
    """Sizes with groupings of their rows, of all patterns; layouts and dtypes in turn."""
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    made = []
    for number, (size, group_rows) in [*enumerate(GROUPS)][::every]:
        plan = Plan("signalled", tile=SMALL, group_rows=group_rows, comm_sms=8)
        layout, dtype = ("nt", "nn")[number % 2], dtypes[number % 3]
        given = {"dtype": dtype, "layout": layout, "plan": plan, "seed": number}
        made += [Case(pattern, *size, **given) for pattern in ("gemm_rs", "gemm_ar")]
        made.append(Case("ag_gemm", *size, bias=number % 2 == 1, **given))
    return made


@pytest.mark.parametrize(("world_size", "turns"), [(1, 1), (2, 2), (3, 1), (4, 1), (8, 1)])
@on_device_ranks("world_size")
def test_exact(rank, turns):
    """Every case; from the second turn on with counters that were used before."""
    group = dist.group.WORLD
    flux_megatron.reset_report()
    made = turns * cases(4 if group.size() == 8 else 1)
    check_all(made)
    assert not workspace(group, here()).size_bytes
    report = flux_megatron.report()
    by_us = report.calls["gemm_rs", "signalled"] + report.calls["gemm_ar", "signalled"]
    assert report.kernels["signalled_gemm"] == by_us
    assert f"signalled_gemm {by_us}" in str(report)
    assert report.kernels["gathered_gemm"] == 2 * report.calls["ag_gemm", "signalled"]
    assert report.calls == {(pattern, "signalled"): len(made) // 3 for pattern in Pattern}
    counters = stages.stage_of(workspace(group, here())).counters
    assert not counters.any(), "what the next call's collectives wait for"


@on_device_ranks(3)
def test_gathered_rows_of_a_late_rank_in_order(rank):
    group, plan = dist.group.WORLD, Plan("signalled", tile=SMALL, group_rows=(2, 3))
    x, w = (torch.arange(rows * 4, device=DEVICE).view(rows, 4).float() for rows in (7, 3))
    for turn in range(3):
        if turn and rank == group.size() - 1:
            time.sleep(0.1)
        taken: list[torch.Tensor] = []
        mine = x + 10 * rank + turn
        plain = ops.run_ag_gemm(mine, w, None, group, plan=plan)
        y = ops.run_ag_gemm(mine, w, None, group, plan=plan, consume=taken.append)
        whole = torch.cat([x + 10 * other + turn for other in range(group.size())])
        assert_exact(taken[0], whole)
        assert_exact(plain, y)
        assert_exact(y, whole @ w.t())
        for tensor in (taken[0], y):
            tensor.fill_(torch.nan)  # what the next call may get for its buffers


def test_32_ctas_leave_in_what_the_largest_band_takes_over_a_slow_link():
    made = bands(2048, 512, 2, (512, 1024), SMALL)
    steps = {ranks: gathered_bands.step_us(made, ranks, 2 * 8192) for ranks in (1, 2, 4)}
    assert steps == {1: 150 // 32, 2: 3505 // 32, 4: 10216 // 32}


@on_device_ranks(2)
def test_rows_of_an_all_reduce_need_not_be_divided_over_the_ranks(rank):
    x, w = torch.ones(5, 4, device=DEVICE), torch.ones(3, 4, device=DEVICE)
    plan = Plan("signalled", tile=SMALL, group_rows=(2, 2))
    y = ops.gemm_all_reduce(x, w, dist.group.WORLD, plan=plan)
    assert_exact(y, torch.full((5, 3), 8.0))


def test_bands_cover_all_rows_in_order():
    for rows in (1, 15, 16, 100):
        for group_rows in ((), (16,), (100,), (30, 30, 30, 30), (7, 9)):
            made, end = bands(rows, 40, 3, group_rows, SMALL), 0
            for band in made:
                assert band.first == end
                assert band.tiles == 3 * -(-band.rows // 16) * 3 > 0
                end += band.rows
            assert end == rows
    assert ends_of(100, (7, 9)) == [7, 16, 100]


def test_the_hopper_kernel_makes_bands_of_whole_tiles(monkeypatch):
    """16-bit, on compute capability 9, of its tile, at whole 16-byte addresses; else the portable
    one does.
    """
    hopper_kernel = pytest.importorskip("flux_megatron.kernels.hopper.signalled_gemm")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    hopper_gemm.refuses_bands.cache_clear()
    tile = replace(hopper_config.TILE, group_m=16)

    def by_hopper(
        rows=512, group_rows=(128, 256), shards=2, dtype=torch.bfloat16, tile=tile, K=64
    ) -> bool:
        x = SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=(rows * shards, K))
        made = bands(rows, 256, shards, group_rows, tile)
        kernel = signalled.kernel_of(x, 256, made, shards, tile)
        assert kernel in (hopper_kernel.signalled_gemm, signalled.signalled_gemm)
        return kernel is hopper_kernel.signalled_gemm

    # the end of y clips the last rows of an all-reduce, but not those of a shard
    taken = [
        {}, {"group_rows": ()}, {"dtype": torch.float16}, {"tile": hopper_config.TILE},
        {"rows": 500, "shards": 1},
    ]  # fmt: skip
    refused = [
        {"rows": 400}, {"shards": 1, "group_rows": (144,)}, {"dtype": torch.float32}, {"K": 60},
        {"tile": replace(tile, block_n=128)},
    ]  # fmt: skip
    assert [given for given in [*taken, *refused] if by_hopper(**given)] == taken
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    hopper_gemm.refuses_bands.cache_clear()
    assert not by_hopper()
    hopper_gemm.refuses_bands.cache_clear()


def test_the_hopper_kernel_goes_on_to_bands_of_a_tile_or_more(monkeypatch):
    monkeypatch.setattr(hopper_gemm, "_refused", lambda *given: None)
    tile = replace(hopper_config.TILE, group_m=16)

    def refused(rows: int, *group_rows: int) -> str | None:
        made = bands(rows, 256, 2, group_rows, tile)
        return hopper_gemm.refuses_gathered("cuda", torch.bfloat16, 64, 256, made, tile)

    assert refused(512, 128, 256) is refused(400, 128) is refused(128) is None
    for rows, *group_rows in ((127,), (300, 100, 100), (256, 129)):
        assert "is lower than a tile of 128" in refused(rows, *group_rows)
    hopper_gemm.refuses_gathered.cache_clear()


def test_default_plans_have_bands_of_whole_tiles():
    for M in (2, 300, 8192):
        for pattern in Pattern:
            problem = Problem(pattern, M, 512, 512, "float32", 2, device="cpu")
            rows = M if pattern is Pattern.GEMM_AR else M // 2
            for plan in registry.candidates(problem, "signalled"):
                assert plan.comm_sms > 0
                block = plan.tile.block_m
                assert all(size % block == 0 for size in plan.group_rows)
                last, largest = rows - sum(plan.group_rows), max(block, *plan.group_rows, 0)
                equal = len({*plan.group_rows}) < 2
                assert min(rows, block) <= last < (largest + block if equal else 2 * largest)
    for pattern in (ROW, Pattern.GEMM_AR):
        asked = Problem(pattern, 8192, 12288, 12288, "bfloat16", 2, device=DEVICE)
        sizes = signalled.default_plan(asked).group_rows
        assert sizes[0] < sizes[4] > sizes[-1], "small at both edges"


class Turn:
    """A communicator that says whose turn it was."""

    def __init__(self, group: dist.ProcessGroup, turn: int, seen: list[int]) -> None:
        self.group, self.turn, self.seen = group, turn, seen

    def __getattr__(self, name: str):
        if name.startswith("_") or name == "allreduce":
            self.seen.append(self.turn)
        return getattr(self.group, name)


@pytest.mark.parametrize(
    ("comm_sms", "turns"), [(6, [0, 1, 2, 0]), (4, [0, 1, 0, 1]), (0, [0] * 4)]
)
@on_cpu_ranks(2)
def test_communicators_take_turns_at_bands(rank, comm_sms, turns):
    """Of two SMs each, as many as the plan's SMs hold."""
    plan = Plan("signalled", tile=SMALL, group_rows=(16, 16, 16), comm_sms=comm_sms)
    seen: list[int] = []

    def communicator(space, sms, turn=0):
        assert sms == min(comm_sms, 2)
        return Turn(space.group, turn, seen)

    with mock.patch.object(stages, "communicator", communicator):
        for number, pattern in enumerate(Pattern):
            seen.clear()
            sizes = (64, 16, 16) if pattern != "gemm_ar" else (32, 16, 16)
            check_all([Case(pattern, *sizes, plan=plan, seed=number)])
            assert seen == turns, pattern


def layers(rank: int) -> None:
    """Forward and backward: a column layer's dgrad scatters, so does a row layer's forward; the
    others gather.
    """
    flux_megatron.reset_report()
    R = dist.get_world_size()
    for kind in ("column", "row"):
        check(layer(kind, R, torch.float32, (12 // R,), 8, 6, False), rank, "xw")
    overlapped = {("gemm_rs", "signalled"): 2, ("ag_gemm", "signalled"): 2}
    assert flux_megatron.report().calls == overlapped


@on_device_ranks(2, environment={"FLUX_MEGATRON_STRATEGY": "signalled"})
def test_layers_forward_and_backward(rank):
    layers(rank)


@pytest.mark.parametrize("strategy", ["auto", "signalled"])
@on_cpu_ranks(4, environment={"FLUX_MEGATRON_STRATEGY": "{strategy}"})
def test_between_nodes_where_nothing_else_overlaps(rank):
    """Two hosts of two ranks each, without shared memory between them."""
    with mock.patch.object(places, "machine", return_value=f"node-{rank // 2}"):
        layers(rank)
    assert "spans 2 nodes" in workspace(dist.group.WORLD, torch.device("cpu")).unavailable


LINKS = {"sockets": {"NCCL_HOSTID": "machine of rank {rank}"}, "memory": {"NCCL_P2P_DISABLE": "1"}}


def between_machines(rank: int) -> None:
    with mock.patch.object(places, "machine", return_value=f"machine of rank {rank}"):
        layers(rank)
    assert "spans 2 nodes" in workspace(dist.group.WORLD, here()).unavailable


@pytest.mark.parametrize("link", ["sockets", pytest.param("memory", marks=OWN_GPUS)])
def test_between_machines_of_one_gpu_each(link):
    """Which NCCL joins by sockets, or by the memory of the machine that they are; or gloo does."""
    environment = {"FLUX_MEGATRON_STRATEGY": "signalled", **LINKS[link]}
    on_device(between_machines, 2, environment=environment, fresh=True)


@on_cpu_ranks(2)
def test_one_open_call(rank):
    x, w = torch.ones(8, 4), torch.ones(3, 4)
    plan = Plan("signalled", tile=SMALL)
    pieces.start_gemm_rs(x, w, dist.group.WORLD, plan=plan)
    with pytest.raises(errors.WorkspaceError, match="another was open"):
        pieces.start_gemm_rs(x, w, dist.group.WORLD, plan=plan)
    with pytest.raises(errors.WorkspaceError, match="is held: a call is in flight"):
        flux_megatron.release()


def test_a_communicator_for_each_number_of_sms(monkeypatch):
    """As on GPUs, where the group's own would have as many CTAs as it likes; they end with the
    workspace.
    """
    own, capturing = mock.Mock(side_effect=lambda space, sms, turn: mock.Mock()), mock.Mock()
    monkeypatch.setattr(stages, "_nccl", own)
    monkeypatch.setattr(stages, "capturing", capturing)
    capturing.return_value = False
    group, stage = SimpleNamespace(group_name="one"), stages.Stage(torch.device("cpu"))
    space = SimpleNamespace(group=group, device=torch.device("cuda"), stage=stage)
    assert stages.communicator(space, 0) is group
    few, many, other = (stages.communicator(space, *one) for one in ((4,), (16,), (4, 1)))
    capturing.return_value = True
    assert stages.communicator(space, 4) is few is not many
    assert stages.communicator(space, 4, 1) is other is not few
    with pytest.raises(errors.WorkspaceError, match="make the same call once before"):
        stages.communicator(space, 8)
    assert [one.args[1:] for one in own.call_args_list] == [(4, 0), (16, 0), (4, 1)]
    stage.close()
    assert few.abort.call_count == many.abort.call_count == 1


@on_cpu_ranks(2)
def test_an_error_of_one_call_is_none_of_another_that_is_open(rank):
    x, w, group = torch.ones(8, 4), torch.ones(3, 4), dist.group.WORLD
    scatter = pieces.start_gemm_rs(x, w, group, plan=Plan("signalled", tile=SMALL))
    space = workspace(group, here())
    gather = calls.start_gather(sequential.gather_rows, x, Plan("sequential"), space)
    fails = mock.patch.object(collectives, "wait", side_effect=RuntimeError("no rows"))
    with fails, pytest.raises(RuntimeError, match="no rows"):
        gather.complete()
    assert torch.equal(scatter.finish(), torch.full((4, 3), 8.0))
    space.check()


@on_cpu_ranks(2)
def test_an_error_in_the_middle_breaks_the_group(rank):
    x, w, group = torch.ones(8, 4), torch.ones(3, 4), dist.group.WORLD
    plan = Plan("signalled", tile=SMALL)
    with (
        mock.patch.object(Launcher, "launch", side_effect=RuntimeError("no kernel")),
        pytest.raises(RuntimeError, match="no kernel"),
    ):
        ops.gemm_reduce_scatter(x, w, group, plan=plan)
    with pytest.raises(errors.GroupBroken, match="no kernel"):
        ops.gemm_reduce_scatter(x, w, group, plan=plan)

"""TransformerEngine's layers with our operations: as without overlap, bit by bit."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import side_by_side as sbs
import te_modules
import torch
import torch.distributed as dist
from ranks import FUSED, on_cpu_ranks
from torch import Tensor

import flux_megatron
from flux_megatron import pieces
from flux_megatron.errors import FallbackRefused
from flux_megatron.integration import arm, fp8

SIZES = {"column": (64, 48), "row": (48, 32)}  # N and K of a rank
BLOCKS = {"column": (256, 128), "row": (128, 384)}  # the same where 128 elements have a scale
NAMED = {"FLUX_MEGATRON_STRATEGY": "{strategy}"}


def integers(made: torch.Generator, *shape: int) -> Tensor:
    """Of another scale in each row and 128 of K, where they have scales of their own."""
    drawn = torch.randint(-4, 5, shape, generator=made).float()
    if not _blocks() or shape[-1] % 128:
        return drawn
    powers = torch.randint(0, 4, (*shape[:-1], shape[-1] // 128), generator=made)
    return drawn * powers.exp2().repeat_interleave(128, -1)


def _blocks() -> bool:
    return te_modules.FP8GlobalStateManager.recipe.float8_block_scaling()


def sizes(mode: str) -> tuple[int, int]:
    return BLOCKS[mode] if _blocks() else SIZES[mode]


pretend = te_modules.install  # tests/protocol/source_mutants.py calls it


def overlapped(recipe: str = "current") -> Any:
    pretend()
    from flux_megatron.integration import te_overlap

    te_modules.FP8GlobalStateManager.recipe = te_modules.Recipe(recipe)
    return te_overlap


def layer(rank: int, mode: str, overlap: bool, bias: bool = False) -> Any:
    made = torch.Generator().manual_seed(7 + rank)
    N, K = sizes(mode)
    added = integers(made, N) if bias else None
    return linear(integers(made, N, K), mode, overlap, added)


def linear(w: Tensor, mode: str, overlap: bool, bias: Tensor | None = None) -> Any:
    made = te_modules.Linear(w, mode, dist.group.WORLD, bias)
    if overlap:
        vars(made).update(fp8.asking(made, "fc1" if mode == "column" else "fc2"))
    return made


def stepped(rank: int, layer: Any, mode: str) -> list[Tensor]:
    """y, dx, dw of [s, b, K] rows, of another scale on each rank."""
    made = torch.Generator().manual_seed(3 + rank)
    length = (8 if mode == "column" else 16) * (8 if _blocks() else 1)
    x = integers(made, length, 2, sizes(mode)[1]) * 2**rank
    x.requires_grad_()
    y = layer(x)
    y.backward(integers(made, *y.shape))
    if layer.delay_wgrad_compute:
        layer(x.detach() + 1)  # overwrites what ranks share
        layer.backward_dw()
    return [y.detach(), x.grad, layer.weight.grad]


def watched(module: Any, name: str) -> Any:
    return mock.patch.object(module, name, wraps=getattr(module, name))


def totals() -> dict[str, int]:
    calls = flux_megatron.report().calls
    return {p: sum(n for (q, _), n in calls.items() if q == p) for p in ("ag_gemm", "gemm_rs")}


def reasons() -> list[str]:
    return [reason for _, reason in flux_megatron.report().fallbacks]


BESIDE = {"current": 1, "none": 0, "block": 2}  # x of the column layer; in blocks, dy of the row's
KEPT = {"current": 2, "none": 1, "block": 0}  # what these give to TE's wgrad otherwise


@pytest.mark.parametrize("delayed", [False, True], ids=["at once", "delayed"])
@pytest.mark.parametrize(
    ("recipe", "strategy"),
    [("current", "fused"), ("none", "fused"), ("block", "pipelined")],
    ids=["fp8", "16 bits", "blockwise"],
)
@on_cpu_ranks(2, environment=NAMED)
def test_layers_follow_those_without_overlap(rank, recipe, delayed):
    overlapped(recipe)
    from flux_megatron.integration import te_communicators

    te_modules.FP8GlobalStateManager.enabled = recipe != "none"
    te_modules.Linear.delay_wgrad_compute = delayed
    with (
        watched(pieces, "start_gather_beside") as beside,
        watched(te_communicators, "keep") as kept,
    ):
        for mode in SIZES:
            ours, plain = (
                stepped(rank, layer(rank, mode, overlap, bias=mode == "column"), mode)
                for overlap in (True, False)
            )
            sbs.assert_same(ours, plain)
    assert beside.call_count == BESIDE[recipe], "gathers by copy engines"
    assert kept.call_count == KEPT[recipe]
    assert totals() == {"ag_gemm": 2 + delayed, "gemm_rs": 2 + delayed}


@pytest.mark.parametrize("strategy", ["sequential", "signalled"])
@on_cpu_ranks(2, environment=NAMED)
def test_strategies_without_symmetric_memory_gather_without_it(rank):
    overlapped()
    with mock.patch.object(pieces, "start_gather_beside") as beside:
        stepped(rank, layer(rank, "column", True), "column")
    assert not beside.call_count


FP8_LAYERS = (1, 2)  # of four


def mixed(rank: int, overlap: bool, rows: int) -> list[Tensor]:
    """One model's layers, some in FP8: y, dx and each dw. All sums are exact."""
    made = torch.Generator().manual_seed(5 + rank)
    layers = []
    for index in range(4):
        mode, shape = (("column", (64, 48)), ("row", (48, 64)))[index % 2]
        layers.append(linear(integers(made, *shape) // 3, mode, overlap))
    x = (integers(made, rows, 1, 48) // 3).requires_grad_()
    y = x
    for index, layer in enumerate(layers):
        te_modules.FP8GlobalStateManager.enabled = index in FP8_LAYERS
        y = layer(y)
    y.backward(integers(made, *y.shape) // 3)
    return [y.detach(), x.grad, *(layer.weight.grad for layer in layers)]


@on_cpu_ranks(2, environment=FUSED)
def test_layers_of_16_bits_and_fp8_stand_side_by_side_with_rows_that_change(rank):
    """`--first-last-layers-bf16`, and packed sequences."""
    overlapped()
    for rows in (8, 40, 8, 24):
        sbs.assert_same(mixed(rank, True, rows), mixed(rank, False, rows))
    assert totals() == {"ag_gemm": 16, "gemm_rs": 16}


@pytest.mark.parametrize(("recipe", "multiple"), [("current", 16), ("block", 128)])
@on_cpu_ranks(2, environment=FUSED)
def test_rows_that_fp8_does_not_take_are_refused_with_the_number_that_would_do(
    rank, recipe, multiple
):
    overlapped(recipe)
    x = integers(torch.Generator().manual_seed(rank), 12, 1, sizes("column")[1])
    with pytest.raises(ValueError, match="rows of FP8") as refused:
        layer(rank, "column", True)(x)
    said = f"12 rows of FP8 on a rank given, a multiple of {multiple} expected"
    assert said in str(refused.value)
    assert f"to {multiple} rows on each tensor-parallel rank" in str(refused.value)


def of_parameters(rank: int, mode: str, overlap: bool, reads_rows: bool) -> list[Tensor]:
    """Two steps of a layer whose weight is FP8 in a buffer, changed in between."""
    te_modules.FP8GlobalStateManager.reads_rows = reads_rows
    made = layer(rank, mode, overlap)
    made.weight = torch.nn.Parameter(te_modules.parameter_of(made.weight.data))
    found = stepped(rank, made, mode)
    made.weight.grad = None
    made.weight.change(integers(torch.Generator().manual_seed(rank), *made.weight.shape) * 8)
    return found + stepped(rank, made, mode)


# the last of a GPU that reads rows: what TransformerEngine does not transpose is not overlapped in
# backward
@pytest.mark.parametrize(
    ("recipe", "strategy", "counts"),
    [("current", "fused", [8]), ("block", "pipelined", [8]), ("current", "fused", [8, 2, 2])],
)
@on_cpu_ranks(2, environment=NAMED)
def test_weights_that_are_fp8_parameters(rank, recipe, counts):
    """`--fp8-param-gather`: the optimizer moves the bytes and changes them in place."""
    overlapped(recipe)
    for mode in SIZES:
        ours, plain = (of_parameters(rank, mode, way, len(counts) > 1) for way in (True, False))
        sbs.assert_same(ours, plain)
    report = flux_megatron.report()
    found = [sum(totals().values()), *report.fallbacks.values(), *report.copies.values()]
    assert found == counts


@on_cpu_ranks(2, environment=FUSED)
def test_other_layers_arms_and_recipes_stay_tes(rank):
    te_overlap = overlapped()
    column, row = layer(rank, "column", True), layer(rank, "row", False)
    assert te_overlap.overlaps(column)
    assert not te_overlap.overlaps(row)
    stepped(rank, row, "row")
    with arm.use(stock=True):
        stepped(rank, column, "column")
    te_modules.FP8GlobalStateManager.recipe = te_modules.Recipe("mxfp8")
    stepped(rank, column, "column")
    assert not any(totals().values())


@pytest.mark.parametrize(
    ("recipe", "splits"), [("current", [False, True]), ("block", [True, True])]
)
@on_cpu_ranks(2)
def test_sums_are_split_where_te_asks_and_always_in_blocks(rank, recipe, splits):
    with watched(overlapped(recipe), "Scaling") as made:
        stepped(rank, layer(rank, "column", True), "column")
    assert [call.args[3] for call in made.call_args_list] == splits, "forward and dx"


@on_cpu_ranks(2)
def test_what_is_asked_for_beside_a_gemm_is_not_computed(rank):
    refused = overlapped()._unsupported
    x = torch.ones(2, 2)
    for name in ("quantization_params", "gelu", "accumulate", "out", "bulk_overlap"):
        assert refused(x, x, 2, {name: True}) == f"TransformerEngine asks for {name}"
        assert refused(x, x, 2, {name: False}) is None


@on_cpu_ranks(2)
def test_a_transpose_from_before_the_optimizers_step_is_not_used(rank):
    refused = overlapped()._unsupported
    w = te_modules.parameter_of(torch.ones(16, 16))
    w.update_usage(columnwise_usage=True)
    assert refused(w, w, 2, {"layout": "NN"}) is None
    w.change(torch.zeros(16, 16) + 2)
    assert "no transpose" in refused(w, w, 2, {"layout": "NN"})


@on_cpu_ranks(2)
def test_a_communicator_ends_with_its_group(rank):
    """A later group may have the same name."""
    te_overlap = overlapped()
    for _ in range(2):
        name = te_overlap.name_for("fc1", dist.group.WORLD)
        made = te_modules.get_ub(f"{name}_fprop", True)
        assert made.group is dist.group.WORLD
        made.group = None


@pytest.mark.parametrize("recipe", ["current", "block"])
@on_cpu_ranks(2, environment=FUSED)
def test_what_we_do_not_compute_runs_without_overlap_and_is_counted(rank, recipe):
    reason = mock.patch.object(overlapped(recipe), "_unsupported", return_value="no such call")
    with reason, pytest.warns(UserWarning, match="no such call"):
        both = [[stepped(rank, layer(rank, mode, overlap), mode) for mode in SIZES]
                for overlap in (True, False)]  # fmt: skip
    sbs.assert_same(*both)
    assert reasons() == ["no such call"] * 2


@on_cpu_ranks(2)
def test_a_library_without_blockwise_scales_leaves_tes_own(rank):
    """It is asked for a GEMM of the rows of a shard, forward and of dx."""
    ops = overlapped("block").ops
    refused = mock.patch.object(ops, "blocks_refused", return_value="no such GEMM")
    with refused as asked, pytest.warns(UserWarning, match="no such GEMM"):
        ours = stepped(rank, layer(rank, "column", True), "column")
    assert [call.args[1:] for call in asked.call_args_list] == [(128, 128), (128, 256)]
    sbs.assert_same(ours, stepped(rank, layer(rank, "column", False), "column"))
    assert reasons() == ["no such GEMM"] * 2


@on_cpu_ranks(2, environment={**FUSED, "FLUX_MEGATRON_STRICT": "1"})
def test_strict_mode_refuses_it(rank):
    reason = mock.patch.object(overlapped(), "_unsupported", return_value="no such call")
    with reason, pytest.raises(FallbackRefused, match="no such call"):
        stepped(rank, layer(rank, "row", True), "row")


@on_cpu_ranks(2)
def test_names_tell_who_gathers(rank):
    overlapped()
    from flux_megatron.integration.te_communicators import gathers

    columns = ["qkv", "q_up_proj", "fc1"]
    for names, direction, other in (
        (columns, "fprop", "dgrad"), (["proj", "fc2"], "dgrad", "fprop"),
    ):  # fmt: skip
        assert all(gathers(f"{name}_{direction}") for name in names)
        assert not any(gathers(f"{name}_{other}") for name in names)


@on_cpu_ranks(2)
def test_rows_that_te_cannot_gather_are_refused(rank):
    overlapped("block")
    with pytest.raises(ValueError, match="blockwise scales") as caught:
        layer(rank, "column", True)(torch.ones(24, 2, BLOCKS["column"][1]))
    said = str(caught.value)
    assert "48 rows of 128 elements with blockwise scales on a rank given" in said
    assert "multiples of 128 expected" in said
    assert "to 128 rows on each tensor-parallel rank" in said

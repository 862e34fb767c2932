"""What others read from a layer is megatron-core's: state, shards, attributes, tags."""

from __future__ import annotations

import inspect
import itertools

import pytest
import side_by_side as sbs
import torch
from ranks import on_cpu_ranks
from side_by_side import Case
from torch.distributed import ProcessGroup

import flux_megatron
from flux_megatron.integration import stand_ins

CASES = [
    Case(kind, {**options, "is_expert": expert, "skip_bias_add": expert})
    for kind, expert, options in itertools.product(
        ("column", "row"), (False, True), ({}, {"bias": False}, {"stride": 2})
    )
] + [
    Case("column", {"skip_weight_param_allocation": True}),
    Case("column", {"gather_output": True}),
]


@pytest.mark.parametrize(("world_size", "sp"), [(1, False), (2, True), (2, False), (4, True)])
@on_cpu_ranks("world_size")
def test_state_is_stocks(rank, sp):
    tp = torch.distributed.get_world_size()
    sbs.start(tp)
    for case in CASES:
        config = sbs.settings(tp, sp, torch.float32)
        theirs, ours = (sbs.build(case, which, config) for which in (False, True))
        assert _attributes(ours) == _attributes(theirs)
        assert isinstance(ours, type(theirs))
        assert repr(ours) == repr(theirs).replace("Column", "FluxColumn").replace("Row", "FluxRow")
        mine, others = (dict(layer.named_parameters()) for layer in (ours, theirs))
        sbs.assert_same(mine, others)
        assert {n: vars(p) for n, p in mine.items()} == {n: vars(p) for n, p in others.items()}
        assert _shards(ours) == _shards(theirs)
        _loads(theirs, ours)
        _loads(ours, theirs)


def _attributes(layer) -> dict:
    hidden = torch.nn.Module().__dict__
    known = {n: v for n, v in vars(layer).items() if n not in hidden and n != "master_weight"}
    return {n: v for n, v in known.items() if not isinstance(v, ProcessGroup)}


def _shards(layer) -> dict:
    groups = {"dp_cp_group": torch.distributed.group.WORLD}
    shards = layer.sharded_state_dict("decoder.", ((0, 1, 2),), groups)
    fields = ("key", "dtype", "local_shape", "global_shape", "global_offset", "axis_fragmentations",
            "replica_id", "prepend_axis_num", "allow_shape_mismatch")  # fmt: skip
    return {name: [getattr(shard, t, None) for t in fields] for name, shard in shards.items()}


def _loads(source, target) -> None:
    state = {k: v + 1 if v is not None else None for k, v in source.state_dict().items()}
    assert [*state] == [*target.state_dict()]
    target.load_state_dict(state, strict=True)
    del state["_extra_state"]  # written by Transformer Engine, absent elsewhere
    target.load_state_dict(state, strict=True)
    for name, parameter in target.named_parameters():
        assert torch.equal(parameter, state[name])


def _of_te(kind: str, config, **options):
    name = {"column": "TEColumn", "row": "TERow", "norm": "TELayerNormColumn"}[kind]
    parallel = {"input_is_parallel": True} if kind == "row" else {"gather_output": False}
    return getattr(stand_ins, f"{name}ParallelLinear")(
        16, 32, config=config, init_method=torch.nn.init.ones_, is_expert=False,
        tp_comm_buffer_name="kv_up_proj", **parallel, **options,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["column", "row", "norm"])
@on_cpu_ranks(2)
def test_what_is_read_of_transformer_engine_s_layers_is_there(rank, kind):
    """Where latents are cached Megatron takes a layer with a norm apart by it."""
    sbs.start(2)
    config = sbs.settings(2, True, torch.float32, normalization="RMSNorm")
    layer = _of_te(kind, config, bias=True, skip_bias_add=True)
    rows, columns = (32, 8) if kind == "row" else (16, 16)
    assert (layer.out_features, layer.in_features, layer.tp_size) == (rows, columns, 2)
    assert (layer.use_bias, layer.te_return_bias, layer.ub_name) == (True, True, "kv_up_proj")
    assert (layer.is_first_microbatch, layer.disable_parameter_transpose_cache) == (False, False)
    assert {"weight", "bias"} <= {*layer.sharded_state_dict()}, "without metadata"
    plain = _of_te(kind, config, bias=False, skip_bias_add=True)
    assert (plain.use_bias, plain.te_return_bias) == (False, False)
    assert not plain.need_backward_dw()
    config.delay_wgrad_compute = True
    assert _of_te(kind, config, bias=False, skip_bias_add=False).need_backward_dw()


def test_public_names_are_these_classes():
    column, row = sbs.PAIRS["column"], sbs.PAIRS["row"]
    assert flux_megatron.ColumnParallelLinear is column[1]
    assert flux_megatron.RowParallelLinear is row[1]
    for theirs, ours in (column, row):
        given, taken = (inspect.signature(c.forward).parameters for c in (theirs, ours))
        assert [*given] == [*taken]

"""Options of Megatron that our layers lack: refused by name, or Megatron computes the call."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import side_by_side as sbs
import torch
from megatron.core.tensor_parallel import layers as stock
from megatron.core.transformer.transformer_config import TransformerConfig
from side_by_side import Case

import flux_megatron
from flux_megatron import settings
from flux_megatron.integration import seams
from flux_megatron.integration.layers import FluxColumnParallelLinear, FluxRowParallelLinear

DEFAULTS = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
WATCHED = {name: row for name, _, row in seams._watched(TransformerConfig)}
GTP = "gtp_remat_size" in inspect.getsource(stock.ColumnParallelLinear)


@pytest.fixture(autouse=True)
def _settings_of_this_test(monkeypatch):
    monkeypatch.delenv("FLUX_MEGATRON_ALLOW", raising=False)
    settings.reload()
    yield
    monkeypatch.undo()
    settings.reload()


def config_with(name: str, value) -> TransformerConfig:
    """As Megatron leaves it: most of these values do not go with these defaults."""
    config = dataclasses.replace(DEFAULTS)
    setattr(config, name, value)
    return config


@pytest.mark.parametrize("layer", [FluxColumnParallelLinear, FluxRowParallelLinear])
@pytest.mark.parametrize("name", WATCHED)
def test_a_field_that_our_layers_would_ignore_is_refused_by_name(name, layer, monkeypatch):
    config, row = config_with(name, "brand new"), WATCHED[name]
    with pytest.raises(ValueError, match=f"\n  {name} is 'brand new': ") as refused:
        layer(8, 8, config=config, init_method=None)
    assert row.because in str(refused.value)
    monkeypatch.setenv("FLUX_MEGATRON_ALLOW", name)
    settings.reload()
    if row.kind == "untried":
        assert "FLUX_MEGATRON_ALLOW=" in str(refused.value)
        seams.check_config(config)
    else:
        with pytest.raises(ValueError, match=name):
            seams.check_config(config)


def test_a_value_that_our_layers_would_ignore_is_refused():
    with pytest.raises(ValueError, match="\n  transformer_impl is 'inference_optimized': "):
        seams.check_config(config_with("transformer_impl", "inference_optimized"))


def test_fields_at_their_defaults_and_harmless_ones_pass():
    seams.check_config(DEFAULTS)
    seams.check_config(config_with("rotary_interleaved", True))
    seams.check_config(object())  # no configuration of Megatron's


def test_a_field_of_a_newer_megatron_is_refused_until_it_is_decided(monkeypatch):
    known = seams.row_of_field
    monkeypatch.setattr(
        seams, "row_of_field", lambda name: None if name == "rotary_interleaved" else known(name)
    )
    seams._watched.cache_clear()
    monkeypatch.setattr(seams, "check_config", seams.check_config)
    try:
        seams.check_config(DEFAULTS)
        with pytest.raises(ValueError, match="rotary_interleaved is True: flux_megatron does not"):
            seams.check_config(config_with("rotary_interleaved", True))
    finally:
        seams._watched.cache_clear()


def test_fields_of_the_user_s_own_configuration_are_not_looked_at():
    @dataclasses.dataclass
    class Mine(TransformerConfig):
        recipe: str = "plain"

    seams.check_config(Mine(num_layers=1, hidden_size=8, num_attention_heads=1, recipe="of mine"))


# arguments of constructors


@pytest.mark.parametrize("kind", ["column", "row"])
@sbs.on_tp_ranks(2)
def test_a_constructor_argument_that_we_do_not_know_leaves_the_calls_to_megatron(rank, kind):
    """As a release after main d98e8a64 may have it: its own forward would heed the argument."""
    parent = sbs.PAIRS[kind][0]
    init = parent.__init__

    def newer(self, *args, brand_new=1, **kwargs):
        init(self, *args, **kwargs)

    parent.__init__ = newer
    seams._defaults.cache_clear()
    parent.__signature__ = inspect.signature(newer).replace(
        parameters=list(inspect.signature(newer).parameters.values())[1:]
    )
    for value, reason in ((1, None), (2, "brand_new=2 is computed by megatron-core")):
        flux_megatron.reset_report()
        case = Case(kind, {"brand_new": value})
        layer = sbs.build(case, True, sbs.settings(2, True, torch.float32))
        x, dy = (t.float() for t in sbs.operands(case, True))
        layer(x.requires_grad_())[0].backward(dy)
        report = flux_megatron.report()
        assert [why for _, why in report.fallbacks] == ([] if reason is None else [reason])
        assert bool(report.overlapped) == (reason is None)


class _Shard(torch.nn.Parameter):
    """A weight whose gather and scatter change nothing: what Megatron's weight shards are asked."""

    def all_gather_and_prefetch(self, fwd):
        return self

    def all_gather_and_prefetch_bwd(self):
        return self

    def use_zero_copy_wgrad(self, dtype):
        return False

    def wgrad_reduce_scatter(self, gradient):
        return gradient


@pytest.mark.skipif(not GTP, reason="this megatron-core has no weight shards")
@pytest.mark.parametrize("kind", ["column", "row"])
@sbs.on_tp_ranks(2, environment={"FLUX_MEGATRON_ALLOW": "gtp_weight_remat_size"})
def test_weight_shards_are_gathered_by_megatron(rank, kind):
    results = []
    flux_megatron.reset_report()
    for ours in (False, True):
        case, config = Case(kind), sbs.settings(2, True, torch.float32)
        layer = sbs.build(case, ours, config)
        if ours:
            layer.gtp_remat_size, layer.config.gtp_weight_remat_size = 2, 2
            layer.weight.__class__ = _Shard
            layer.weight.main_grad = torch.zeros_like(layer.weight)
        x, dy = (t.float() for t in sbs.operands(case, True))
        y = layer(x.requires_grad_())[0]
        y.backward(dy)
        results.append((y, x.grad, layer.weight.grad))
    sbs.assert_same(*results)
    report = flux_megatron.report()
    ((_, reason),) = report.fallbacks
    assert reason == "gtp_remat_size=2 is computed by megatron-core"
    assert not report.overlapped

"""`FluxCoreAttention` beside megatron-core's `DotProductAttention`: values, gradients, dropout."""

from __future__ import annotations

import contextlib
import functools
import itertools
import types

import pytest
import side_by_side as sbs
import torch
from closeness import assert_as_close_as, largest_error
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from flux_megatron.integration import attention as subject
from flux_megatron.integration.attention import FluxCoreAttention
from flux_megatron.versions.megatron_core import MEGATRON_CORE

S, B, HEADS, D = 24, 3, 4, 8
CLASSES = {"ours": FluxCoreAttention, "stock": DotProductAttention}
CAUSAL, PADDING = AttnMaskType.causal, AttnMaskType.padding
SINCE_0_15 = pytest.mark.skipif(
    not MEGATRON_CORE.since("0.15"),
    reason="no windows and no softmax offsets without TransformerEngine",
)


def build(which: str, mask_type=CAUSAL, dtype=torch.float32, layer=1, scale=None, **more):
    config = sbs.settings(1, False, dtype, **{"hidden_size": HEADS * D, **more})
    return CLASSES[which](
        config=config, layer_number=layer, attn_mask_type=mask_type, attention_type="self",
        softmax_scale=scale,
    )  # fmt: skip


def operands(sq=S, sk=S, groups=HEADS, draw=0) -> list[Tensor]:
    """query, key, value, and the gradient of the result."""
    random = torch.Generator().manual_seed(sq + sk + groups + 1000 * draw)
    sizes = [(sq, B, HEADS, D), (sk, B, groups, D), (sk, B, groups, D), (sq, B, HEADS * D)]
    return [torch.randn(size, generator=random) for size in sizes]


def run_each(
    module, draws: list[list[Tensor]], mask: Tensor | None, dtype: torch.dtype
) -> list[Tensor]:
    """`run` of each draw, stacked."""
    return [torch.stack(s) for s in zip(*(run(module, g, mask, dtype) for g in draws), strict=True)]


def run(module, given: list[Tensor], mask: Tensor | None, dtype: torch.dtype) -> list[Tensor]:
    *leaves, dy = (t.to(dtype) for t in given)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    y = module(*leaves, mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None)
    y.backward(dy)
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def causal_mask() -> Tensor:
    return torch.ones(1, 1, S, S, dtype=torch.bool).triu(1)


def two_documents() -> Tensor:
    """A causal mask that is reset in the middle."""
    mask = causal_mask()
    mask[..., S // 2 :, : S // 2] = True
    return mask


def padding(sq: int, sk: int) -> Tensor:
    """The sequences of a batch have different lengths."""
    lengths = torch.arange(sk, sk - B, -1)
    return (torch.arange(sk) >= lengths[:, None])[:, None, None, :].expand(B, 1, sq, sk)


# mask type, mask, queries, keys
MASKS = {
    "causal": (CAUSAL, None, S, S),
    "causal, mask given": (CAUSAL, causal_mask(), S, S),
    "causal, two documents": (CAUSAL, two_documents(), S, S),
    "causal, one query": (CAUSAL, None, 1, S),
    "padding": (PADDING, padding(S, S), S, S),
    "padding, other keys": (PADDING, padding(S, S + 8), S, S + 8),
    "everything visible": (PADDING, None, S, S),
}


@sbs.on_tp_ranks(1)
def test_as_close_to_the_reference_as_stock(rank):
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for name, groups, dtype in itertools.product(MASKS, (HEADS, 2, 1), dtypes):
        mask_type, mask, sq, sk = MASKS[name]
        # with one draw a processor without AVX-512 rounds ours to 2.03 times stock's largest error
        draws = [operands(sq, sk, groups, draw) for draw in range(4)]
        more = {"mask_type": mask_type, "num_query_groups": groups}
        rounded = [[t.to(dtype) for t in given] for given in draws]
        reference = run_each(build("stock", **more), rounded, mask, torch.float64)
        more |= {"dtype": dtype, "fp16": dtype == torch.float16}
        got, baseline = (run_each(build(which, **more), draws, mask, dtype) for which in CLASSES)
        for what, *three in zip(("y", "dq", "dk", "dv"), got, baseline, reference, strict=True):
            # in so few numbers two roundings of the largest one are luck
            roundings = 2 * torch.finfo(dtype).eps * three[2].abs().max().item()
            if not largest_error(three[0], three[2]) <= roundings:
                assert_as_close_as(*three, f"{name}, {groups} groups, {dtype}: {what}")


@sbs.on_tp_ranks(1)
def test_scales_and_masks(rank):
    given = operands()

    def values(which: str, mask: Tensor | None = None, **options) -> Tensor:
        return run(build(which, **options), given, mask, torch.float32)[0]

    plain = values("stock")
    for options in (
        {"scale": 0.7},
        {"layer": 3, "apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True},
    ):
        torch.testing.assert_close(values("ours", **options), values("stock", **options))
    assert not torch.allclose(values("ours", scale=0.7), plain, rtol=0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FluxCoreAttention, "reads_causal_masks", False)
        torch.testing.assert_close(values("ours", two_documents()), plain)
        masked = values("ours", padding(S, S), mask_type=PADDING)
        torch.testing.assert_close(masked, values("stock", padding(S, S), mask_type=PADDING))
    # nothing is visible in the first sequence
    mask = padding(S, S).clone()
    mask[0] = True
    for result in run(build("ours", PADDING), given, mask, torch.float32):
        assert result.isfinite().all()


@sbs.on_tp_ranks(1)
def test_a_given_mask_replaces_the_causal_one(rank):
    plain, masked = (
        run(build("ours"), operands(), mask, torch.float32)[0] for mask in (None, two_documents())
    )
    stock = run(build("stock"), operands(), two_documents(), torch.float32)[0]
    torch.testing.assert_close(masked, stock)
    half = S // 2  # the second document sees nothing of the first
    torch.testing.assert_close(masked[:half], plain[:half])
    assert not torch.allclose(masked[half:], plain[half:], rtol=0.1)


@pytest.mark.parametrize("mask", ["causal", "padding"])
@sbs.on_tp_ranks(1)
def test_no_scores_are_kept(rank, mask):
    mask_type, given_mask, *_ = MASKS[mask]
    largest = {}
    for which in CLASSES:
        given = build(which, mask_type), operands(), given_mask, torch.float32
        *_, largest[which] = sbs.saved_sizes(functools.partial(run, *given))
    assert largest["stock"] >= B * HEADS * S * S
    assert largest["ours"] < B * HEADS * S * S


@sbs.on_tp_ranks(1)
def test_dropout(rank):
    """Weights that are kept grow, so that the sum over many stays; heads of ranks differ."""
    forks = []

    @contextlib.contextmanager
    def fork():
        forks.append("fork")
        yield

    query, key, value, _ = operands()
    for sp, p in itertools.product((True, False), (0.0, 0.5)):
        forks.clear()
        ours = build("ours", PADDING, attention_dropout=p)
        ours.config.sequence_parallel = sp
        with pytest.MonkeyPatch.context() as patch:
            tracker = types.SimpleNamespace(fork=fork)
            patch.setattr(
                subject.tensor_parallel, "get_cuda_rng_tracker", lambda tracker=tracker: tracker
            )
            y = ours(query, key, torch.ones_like(value), None)
            assert forks == ["fork"] * (p > 0 and not sp)
            assert abs(y.mean() - 1) < 0.05
            assert (y.std() > 0.05) == (p > 0)
            assert torch.allclose(ours.eval()(query, key, torch.ones_like(value), None), y * 0 + 1)


@SINCE_0_15
@sbs.on_tp_ranks(1)
def test_what_torch_does_not_know_is_stocks(rank):
    given = operands()
    for message, options in {
        "sliding windows": {"window_size": (4, 0)},
        "softmax offsets": {"softmax_type": "off-by-one"},
    }.items():
        with pytest.warns(UserWarning, match=message):
            ours = build("ours", **options)
        pair = (ours, build("stock", **options))
        sbs.assert_same(*(run(module, given, None, torch.float32) for module in pair))
    ours = build("ours")
    for refused in ({"packed_seq_params": object()}, {"attention_bias": torch.zeros(1)}):
        with pytest.raises(AssertionError, match="not supported"):
            ours(*given[:3], None, **refused)
    with pytest.raises(AssertionError, match="only for self attention"):
        ours(*operands(S // 2, S)[:3], None)
    with pytest.raises(AssertionError, match="Context parallelism"):
        build("ours", context_parallel_size=2)


@SINCE_0_15
@sbs.on_tp_ranks(1)
def test_parameters_and_checkpoints_are_stocks(rank):
    settings = {"softmax_type": "learnable", "perform_initialization": False}
    ours, stock = (build(which, **settings) for which in CLASSES)
    assert [*ours.state_dict()] == [*stock.state_dict()] == ["softmax_offset"]
    assert [*build("ours").state_dict()] == []

"""Our dispatcher and experts beside Megatron's: the same losses and gradients, on two ranks."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from collections.abc import Iterator
from unittest import mock

import pytest
import side_by_side as sbs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.activations import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import experts as stock_experts
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from ranks import on_cpu_ranks

import flux_megatron
from flux_megatron import settings
from flux_megatron.expert_parallel import kept_rows
from flux_megatron.integration import (
    arm,
    coverage,
    expert_layers,
    experts,
    install,
    requirements,
)
from flux_megatron.integration.flags import options_from
from flux_megatron.lab.train.specs import gpt_block_spec
from flux_megatron.versions.megatron_core import MEGATRON_CORE

moe_utils.te_general_gemm = None  # up to 0.16 asked for also where there is none
VOCAB, STEPS = 64, 3
CASES = {
    "two a token": {"num_moe_experts": 4, "moe_router_topk": 2},
    "swiglu, empty experts": {
        "num_moe_experts": 8, "moe_router_topk": 1, "moe_router_pre_softmax": True,
        "gated_linear_unit": True, "activation_func": F.silu,
    },
}  # fmt: skip
GPT_OSS = {
    "num_moe_experts": 8, "moe_router_topk": 4, "add_bias_linear": True,
    "gated_linear_unit": True, "activation_func": quick_gelu, "bias_activation_fusion": False,
    "activation_func_clamp_value": 0.02, "glu_linear_offset": 1.0,
    # a bias is whole rows and whole units of Megatron's buffers, as with gpt-oss: weights with
    # biases between them are one tensor
    "hidden_size": 64, "ffn_hidden_size": 64, "moe_ffn_hidden_size": 64,
}  # fmt: skip
BIASED = {"num_moe_experts": 4, "moe_router_topk": 2, "add_bias_linear": True}
ACT = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}
# that Megatron runs without TransformerEngine; on a stream of their own, or of the CPU none
SHARED = {
    "moe_shared_expert_intermediate_size": 24, "moe_shared_expert_overlap": True,
    # from 0.16 on
    **dict.fromkeys({"moe_shared_expert_gate"} & {*TransformerConfig.__dataclass_fields__}, True),
}  # fmt: skip
# before 0.16 stock has none, or a bias of the router that nothing sets
WITH_BIASES = {
    "biases, no gate": BIASED, "as gpt-oss": GPT_OSS, "as gpt-oss, recomputed": GPT_OSS | ACT,
} if MEGATRON_CORE.since("0.16") else {}  # fmt: skip
# Megatron's fused SwiGLU passes the clamp over
FUSED_CLAMPED = {"fused swiglu, a clamp": CASES["swiglu, empty experts"] | {
    "bias_activation_fusion": True, "activation_func_clamp_value": 0.02,
}} if MEGATRON_CORE.since("0.16") else {}  # fmt: skip
MORE = {
    "recomputed activations": CASES["swiglu, empty experts"] | ACT,
    "shared experts beside": CASES["two a token"] | SHARED,
    "all-gather": CASES["two a token"] | {"moe_token_dispatcher_type": "allgather"},
    **WITH_BIASES,
    **FUSED_CLAMPED,
}


@contextlib.contextmanager
def ours() -> Iterator[None]:
    with contextlib.ExitStack() as undo:
        experts.use(undo)
        yield


EXPERTS = {
    "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "moe_ffn_hidden_size": 48,
    "add_bias_linear": False,
    "moe_token_dispatcher_type": "alltoall", "moe_router_load_balancing_type": "none",
    "expert_model_parallel_size": 2,
}  # fmt: skip


def build(sequence: int, **more) -> GPTModel:
    sbs.seed()
    late = {name: more.pop(name) for name in ACT if name in more}  # refused of experts on the CPU
    config = sbs.settings(1, False, torch.float32, **EXPERTS | more)
    vars(config).update(late)
    spec = gpt_block_spec(config)
    model = GPTModel(config, spec, VOCAB, sequence, position_embedding_type="rope")
    made = torch.Generator().manual_seed(dist.get_rank())
    for name, parameter in model.named_parameters():
        if ".experts." in name and name.endswith("bias"):  # which are 0
            torch.nn.init.normal_(parameter, std=0.02, generator=made)
    return model


def trained(rank: int, sequence: int, more: dict) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of some steps of SGD, and the last gradients."""
    model = build(sequence, **more)
    losses = []
    for step in range(STEPS):
        made = torch.Generator().manual_seed(10 * step + rank)
        tokens = torch.randint(0, VOCAB, (1, sequence + 1), generator=made)
        positions = torch.arange(sequence)[None]
        mask = torch.ones(sequence, sequence).tril()[None, None] < 0.5
        loss = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).mean()
        model.zero_grad()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                if getattr(parameter, "allreduce", True):
                    dist.all_reduce(parameter.grad)
                parameter -= 0.05 * parameter.grad
    return losses, {name: one.grad for name, one in model.named_parameters()}


def as_of_the_stock_dispatcher(rank: int, sequence: int, more: dict) -> None:
    sbs.start(1, expert_model_parallel_size=2)
    with sbs.splits_as_lists():
        stock_losses, stock_gradients = trained(rank, sequence, more)
    assert not flux_megatron.report().calls
    with ours():
        losses, gradients = trained(rank, sequence, more)
    torch.testing.assert_close(losses, stock_losses, rtol=2e-6, atol=0)
    torch.testing.assert_close(gradients, stock_gradients, rtol=2e-4, atol=2e-6)
    parallel_state.destroy_model_parallel()
    assert losses[0] != losses[-1]


@pytest.mark.parametrize(
    ("case", "sequence", "strategy"),
    [
        ("two a token", 12, "fused"), ("swiglu, empty experts", 3, "fused"),
        ("two a token", 5, "signalled"), *[(case, 7, "fused") for case in MORE],
    ],
)  # fmt: skip
@on_cpu_ranks(2, environment={"FLUX_MEGATRON_STRATEGY": "{strategy}"})
def test_losses_are_those_of_the_stock_dispatcher(rank, case, sequence, strategy):
    as_of_the_stock_dispatcher(rank, sequence, {**CASES, **MORE}[case])
    # two layers, both ways
    counted = {(operation, strategy): 4 * STEPS for operation in ("a2a_gemm", "gemm_a2a")}
    assert flux_megatron.report().calls == counted


@pytest.mark.parametrize("case", CASES | {"shared experts beside": MORE["shared experts beside"]})
@on_cpu_ranks(2)
def test_the_stock_arm_of_a_comparison_has_stock_experts(rank, case):
    """Of a model that has ours: all of Megatron's, in every bit, and no call of ours."""
    sbs.start(1, expert_model_parallel_size=2)
    more = {**CASES, **MORE}[case]
    with sbs.splits_as_lists():
        stock_losses, stock_gradients = trained(rank, 6, more)
        with ours(), arm.use(stock=True):
            losses, gradients = trained(rank, 6, more)
    assert not flux_megatron.report().calls
    assert losses == stock_losses
    torch.testing.assert_close(gradients, stock_gradients, rtol=0, atol=0)
    parallel_state.destroy_model_parallel()


# with fewer experts for some tokens, and none for others
DROPPED = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_expert_capacity_factor": 0.5}
ONCE = CASES | MORE | {"dropped": DROPPED}


@pytest.mark.parametrize("case", ONCE)
@on_cpu_ranks(2, environment={"FLUX_MEGATRON_EXPERTS_ONCE": "1"})
def test_losses_where_a_token_travels_once(rank, case):
    as_of_the_stock_dispatcher(rank, 12, ONCE[case])
    assert not flux_megatron.report().calls  # none that sends rows once an expert


@pytest.mark.parametrize("once", ["0", "1"])
@pytest.mark.parametrize("case", ["swiglu, empty experts", "recomputed activations"])
@on_cpu_ranks(2, environment={"FLUX_MEGATRON_EXPERTS_ONCE": "{once}"})
def test_losses_where_rows_are_kept_at_their_size(rank, case):
    """As with more ranks than are here. All but the last two layers of a step are copied."""
    shrunk = []
    shrink = kept_rows.Kept.shrink

    def noted(kept: kept_rows.Kept) -> None:
        shrunk.append(len(kept.packed))
        shrink(kept)
        whole = [one for one in kept.packed if one.tensor.untyped_storage().size()]
        assert {len(one.tensor) for one in whole} <= {int(kept._count)}

    with (
        mock.patch.multiple(kept_rows, TIMES=0, MOST=1),
        mock.patch.object(kept_rows.Kept, "shrink", noted),
    ):
        as_of_the_stock_dispatcher(rank, 7, {**CASES, **MORE}[case])
    # of the last layer of a step nothing is left when the next step begins
    assert [count > 0 for count in shrunk] == [True, False] * (STEPS - 1) + [True]


UNEQUAL = {"FLUX_MEGATRON_EXPERTS_ONCE": "{once}", "FLUX_MEGATRON_EXPERT_TOKENS": "9"}


@pytest.mark.parametrize("once", ["0", "1"])
@pytest.mark.parametrize("case", ["swiglu, empty experts", *[*WITH_BIASES][1:2]])
@on_cpu_ranks(2, environment=UNEQUAL)
def test_losses_where_ranks_have_different_numbers_of_tokens(rank, case):
    """As packed batches of data parallelism."""
    as_of_the_stock_dispatcher(rank, (9, 4)[rank], {**CASES, **MORE}[case])


@pytest.mark.parametrize("once", ["0", "1"])
@on_cpu_ranks(2, environment=UNEQUAL)
def test_more_tokens_than_was_said_are_an_error_on_every_rank(rank):
    sbs.start(1, expert_model_parallel_size=2)
    refused = (ValueError, flux_megatron.errors.ProblemMismatch)
    with ours(), pytest.raises(refused, match=r"10 tokens given, .*TOKENS=9 at most expected"):
        trained(rank, 10 - rank, CASES["two a token"])


@pytest.mark.parametrize("once", ["0", "1"])
@on_cpu_ranks(2, environment={"FLUX_MEGATRON_EXPERTS_ONCE": "{once}"})
def test_losses_where_as_many_rows_could_come_as_there_are_experts(rank, once):
    """Of one expert a token on each of two ranks: counts, weights and biases have two rows too."""
    one_a_token = {"moe_router_topk": 1, "moe_router_pre_softmax": True, "num_moe_experts": 4}
    with mock.patch.multiple(kept_rows, TIMES=0, MOST=1):
        as_of_the_stock_dispatcher(rank, 1, one_a_token)


def kinds() -> tuple[type, type]:
    """Of the dispatcher and the experts of a new model. Linear layers that ours do not call are
    none of those that should overlap.
    """
    model = build(4, **CASES["two a token"], expert_model_parallel_size=1)
    moe = model.decoder.layers[0].mlp
    others = [name for name, _ in coverage.layers_of([model]).others if "experts" in name]
    assert not others or type(moe.experts) is stock_experts.SequentialMLP
    return type(moe.token_dispatcher), type(moe.experts)


@pytest.mark.parametrize("way", ["flag", "call", "variable"])
@on_cpu_ranks(1, environment={"FLUX_MEGATRON_EXPERTS": "0"})
def test_the_flag_and_enable_put_them_in_place(rank, way):
    os.environ["FLUX_MEGATRON_EXPERTS"] = str(int(way == "variable"))
    settings.reload()
    sbs.start(1)
    if way == "flag":
        install.install(options_from(sbs.parse("--flux-overlap", "--flux-experts")))
    else:
        flux_megatron.enable(experts=True if way == "call" else None)
    grouped = stock_experts.TEGroupedMLP.__init__
    assert kinds() == (experts.FluxTokenDispatcher, expert_layers.FluxExperts)
    flux_megatron.disable()
    assert stock_experts.TEGroupedMLP.__init__ is not grouped
    flux_megatron.enable(experts=False)
    assert kinds() == (token_dispatcher.MoEAlltoAllTokenDispatcher, stock_experts.SequentialMLP)
    flux_megatron.disable()


REFUSED = {
    "beside the others in a CUDA graph": {
        "moe_shared_expert_overlap": True, "cuda_graph_impl": "local",
    },
    "beside the others in a CUDA": {
        "moe_shared_expert_overlap": True, "enable_cuda_graph": True,
    },
    **{rf"\({name}\)$": {name: 1} for name in (
        "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity",
        "moe_router_padding_for_quantization", "moe_router_padding_for_fp8",
        "moe_apply_probs_on_input", "moe_single_grouped_weight", "moe_single_grouped_bias",
        "moe_use_legacy_grouped_gemm",
        "use_transformer_engine_op_fuser", "moe_mlp_glu_interleave_size", "delay_wgrad_compute",
        "overlap_dispatch_backward_with_experts_wgrad", "overlap_moe_expert_parallel_comm",
        "fp8", "fp4",
    )},
}  # fmt: skip


def with_experts() -> argparse.Namespace:
    args = sbs.parse("--flux-overlap", "--flux-experts")
    vars(args).update(moe_token_dispatcher_type="alltoall", num_experts=4)
    return args


@pytest.mark.parametrize("message", REFUSED)
def test_what_it_cannot_run_is_refused_before_the_start(message):
    args = with_experts()
    assert not requirements.refusals(args, {})
    vars(args).update(REFUSED[message])
    (refusal,) = (r for r in requirements.refusals(args, {}) if r.name == "--flux-experts")
    assert re.search(message, refusal.why)


def test_divided_experts_and_other_dispatchers_are_refused_before_the_start():
    args = with_experts()
    args.tensor_model_parallel_size = 2  # which experts follow unless they have their own
    with pytest.raises(ValueError, match="over 2 tensor-parallel ranks, 1 expected"):
        install.install_from(args)
    args.flux_experts = None  # the variable asks for them
    with mock.patch.dict(os.environ, FLUX_MEGATRON_EXPERTS="1"):
        settings.reload()
        with pytest.raises(ValueError, match="over 2 tensor-parallel ranks, 1 expected"):
            install.install_from(args)
    settings.reload()
    args.expert_tensor_parallel_size = 1
    assert not requirements.refusals(args, {})
    args.moe_token_dispatcher_type = "allgather"
    assert not requirements.refusals(args, {})
    args.flux_compare = 5
    with pytest.raises(ValueError, match="--flux-compare: stock experts would have"):
        install.install_from(args)
    args.flux_compare = None
    args.moe_token_dispatcher_type = "flex"
    with pytest.raises(ValueError, match="type flex given, alltoall or allgather expected"):
        install.install_from(args)


@on_cpu_ranks(2)
def test_a_model_that_no_argument_tells_of_is_refused_when_it_is_built(rank):
    sbs.start(1, expert_model_parallel_size=2)
    for more in ({"moe_expert_capacity_factor": 1.0}, {"moe_apply_probs_on_input": True}):
        with ours(), pytest.raises(ValueError, match="our experts cannot run this model"):
            build(4, **CASES["two a token"], **more)
    build(4, **CASES["two a token"])
    flex = mock.patch.object(experts, "DISPATCHERS", {"allgather": "MoEAllGatherTokenDispatcher"})
    with ours(), flex, pytest.raises(ValueError, match="type alltoall given, allgather expected"):
        build(4, **CASES["two a token"])
    impl = {"moe_token_dispatcher_type": "alltoall", "transformer_impl": "inference_optimized"}
    assert "has experts of its own" in experts._apart(argparse.Namespace(**impl))


@pytest.mark.parametrize("once", ["0", "1"])
@on_cpu_ranks(2, environment={"FLUX_MEGATRON_EXPERTS_ONCE": "{once}"})
def test_activations_of_experts_are_made_again_for_backward_where_that_is_asked(rank):
    sbs.start(1, expert_model_parallel_size=2)
    layers, ours_are = 2, expert_layers.FluxExperts
    made = ours_are._activated
    for more, times in (({}, 1), (ACT, 2)):
        with ours(), mock.patch.object(ours_are, "_activated", autospec=True) as called:
            called.side_effect = made
            trained(rank, 5, CASES["two a token"] | more)
        assert called.call_count == times * layers * STEPS
    parallel_state.destroy_model_parallel()

"""What a post-training process does to models, each beside stock: TP 2, with and without sequence
parallelism.

`test_enabling.py` has deep copies and state dicts, `test_adapters.py` LoRA.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import side_by_side as sbs
import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.dot_product_attention import DotProductAttention
from ranks import FUSED
from test_enabling import BOUND, build, packed, with_our_norms
from training_cases import SELECTIVE, UNIFORM, names_of_te

import flux_megatron
from flux_megatron.symm.workspace import workspaces

SP = pytest.mark.parametrize("sp", [True, False], ids=["sp", "no sp"])
RECOMPUTE = {"none": {}, "full": UNIFORM, "selective": SELECTIVE}
# tokens of the sequences of a micro-batch; those of no token are the padding of `cu_seqlens`. For
# the third one symmetric memory grows
EVEN = [(5, 3), (6,), (70, 0, 9, 1), (14, 0, 0), (1, 1)]
ODD = [(5, 4), (7,), (1,), (2, 0, 1)]


DENSE = DotProductAttention.forward


def attend_in_sequences(
    self: Any, q: Any, k: Any, v: Any, mask: Any, *, packed_seq_params: Any, **more: Any
) -> torch.Tensor:
    """Stands for TransformerEngine's attention of `thd`, which Megatron's own has not."""
    order = torch.arange(len(q))
    number = torch.bucketize(order, packed_seq_params.cu_seqlens_q[1:], right=True)
    mask = (number[:, None] != number) | (order[:, None] < order)
    return DENSE(self, *(part[:, None] for part in (q, k, v)), mask[None, None], **more)


def run(model: GPTModel, lengths: tuple[int, ...], seed: int, labelled: bool = True) -> Any:
    """Losses [1, total], or what the head returns where there are no labels."""
    tokens, positions, _, labels = packed(lengths, seed)
    begins = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    thd = PackedSeqParams("thd", begins, begins)
    thd.max_seqlen_q = thd.max_seqlen_kv = max(lengths)
    more = {"labels": labels} if labelled else {}
    return model(tokens, positions, None, packed_seq_params=thd, **more)


def log_probs(model: GPTModel, lengths: tuple[int, ...], seed: int) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        found = run(model, lengths, seed)
    model.train()
    return found


def learn(model: GPTModel, micro_batches: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """One step of SGD; the last micro-batch is padding alone: it counts for nothing."""
    seen = []
    for seed, lengths in enumerate(micro_batches):
        found = run(model, lengths, seed)
        seen.append(found.detach())
        (found.mean() * (seed + 1 < len(micro_batches))).backward()
    for parameter in model.parameters():
        if parameter.grad is None:
            continue
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(parameter.grad)
        seen.append(parameter.grad)
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None
    return seen


def beside_stock(
    sp: bool, life: Callable[..., list[torch.Tensor]], *, strict: bool = True, **more: Any
) -> None:
    """`life(build)` returns the same where stock builds and where we do."""
    with mock.patch.object(DotProductAttention, "forward", attend_in_sequences), names_of_te():
        expected = life(partial(with_our_norms, sp, **more))
        flux_megatron.enable(strict=strict)
        flux_megatron.reset_report()
        got = life(partial(build, sp, **more))
        flux_megatron.disable()
    for number, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert float((one - other).abs().max()) <= BOUND, number
    report = flux_megatron.report()
    assert report.overlapped > 0
    assert report.overlapped == report.total or not strict


@SP
@pytest.mark.parametrize("recompute", RECOMPUTE)
@sbs.on_tp_ranks(2, environment=FUSED)
def test_packed_sequences_of_another_total_each(rank, recompute, sp):
    def life(make: Any) -> list[torch.Tensor]:
        model = make()
        seen = learn(model, EVEN)
        seen.append(log_probs(model, (4, 4), 9))
        return seen + learn(model, EVEN[::-1])

    beside_stock(sp, life, **RECOMPUTE[recompute])


@SP
@sbs.on_tp_ranks(2, environment=FUSED)
def test_odd_totals(rank, sp):
    """Without sequence parallelism calls of them do not overlap; with it stock refuses them."""

    def life(make: Any) -> list[torch.Tensor]:
        model = make()
        if not sp:
            return learn(model, [*ODD, *EVEN])
        with pytest.raises(AssertionError, match="divisible"):
            run(model, ODD[0], 0)
        return learn(model, EVEN)

    beside_stock(sp, life, strict=sp)
    assert {reason for _, reason in flux_megatron.report().fallbacks} == (
        set() if sp else {f"{sum(n)} rows cannot be divided over 2 ranks" for n in ODD}
    )


class ValueHead(torch.nn.Linear):
    """A critic's, whole on each rank, in the place of the LM head."""

    def __init__(self, config: Any) -> None:
        super().__init__(config.hidden_size, 1, bias=False)
        self.sp = config.sequence_parallel
        self.weight.sequence_parallel = self.sp

    def forward(self, x: torch.Tensor, weight: Any = None, **_: Any) -> tuple[torch.Tensor, None]:
        y = super().forward(x)
        if self.sp:
            y = mappings.gather_from_sequence_parallel_region(y, tensor_parallel_output_grad=False)
        return y, None


@SP
@sbs.on_tp_ranks(2, environment=FUSED)
def test_actor_reference_and_critic_of_other_widths_sleep_and_wake(rank, sp):
    """Weights go and come in every way; the memory of calls is released at each sleep."""

    def life(make: Any) -> list[torch.Tensor]:
        actor, reference = make(), make().requires_grad_(False)
        critic = make(hidden_size=32, ffn_hidden_size=48, num_layers=2)
        critic.output_layer = ValueHead(critic.config)
        seen: list[torch.Tensor] = []

        def learned(model: GPTModel, loss: torch.Tensor) -> None:
            loss.backward()
            seen.extend(p.grad.clone() for p in model.parameters())
            model.zero_grad()

        for sleep_and_wake in (in_new_storage, back_in_old_storage):
            seen += [log_probs(model, (7, 3), 5) for model in (actor, reference)]
            seen += learn(actor, EVEN[:3])
            learned(critic, run(critic, (9, 3), 6, labelled=False).square().mean())
            waits = run(actor, (6, 2), 8).mean()
            for model in (reference, critic):
                sleep_and_wake(model)
            assert workspaces() == []
            learned(actor, waits)  # a backward whose forward was before
            sleep_and_wake(actor)
        return seen

    beside_stock(sp, life)


def in_new_storage(model: GPTModel) -> None:
    """Offloaded, and loaded elsewhere. What has the old addresses reads NaN."""
    for parameter in model.parameters():
        old = parameter.data
        parameter.data = old * 0.99
        old.fill_(torch.nan)
    flux_megatron.release()


def back_in_old_storage(model: GPTModel) -> None:
    """Offloaded, and loaded into a storage that was of no size in between."""
    held = [parameter.data.clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data.untyped_storage().resize_(0)
    flux_megatron.release()
    for parameter, data in zip(model.parameters(), held, strict=True):
        parameter.data.untyped_storage().resize_(data.nbytes)
        parameter.data.copy_(data)

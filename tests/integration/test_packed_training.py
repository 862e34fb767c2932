"""What a post-training process does to models, each beside stock: TP 2, with and without sequence
parallelism.

`test_enabling.py` has deep copies and state dicts, `test_adapters.py` LoRA.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import post_training as post
import pytest
import side_by_side as sbs
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import mappings
from post_training import BOUND, EVEN, build, learn, log_probs, run, with_our_norms
from ranks import FUSED
from training_cases import SELECTIVE, UNIFORM, names_of_te

import flux_megatron
from flux_megatron.symm.workspaces import workspaces

SP = pytest.mark.parametrize("sp", [True, False], ids=["sp", "no sp"])
RECOMPUTE = {"none": {}, "full": UNIFORM, "selective": SELECTIVE}
ODD = [(5, 4), (7,), (1,), (2, 0, 1)]


def beside_stock(
    sp: bool, life: Callable[..., list[torch.Tensor]], *, strict: bool = True, **more: Any
) -> None:
    """`life(build)` returns the same where stock builds and where we do."""
    with post.attention_of_sequences, names_of_te():
        expected = life(partial(with_our_norms, sp, **more))
        flux_megatron.enable(strict=strict)
        flux_megatron.reset_report()
        got = life(partial(build, sp, **more))
        flux_megatron.disable()
    torch.testing.assert_close(got, expected, rtol=0, atol=BOUND)
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

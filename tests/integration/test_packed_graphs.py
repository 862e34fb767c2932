"""A post-training loop in CUDA graphs, on two GPUs: packed sequences of one total, captured once,
then replayed with other tokens and renewed weights, between eager micro-batches of other totals.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from cases import ON_HOPPER
from closeness import assert_exact
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from ranks import here, on_device_ranks
from side_by_side import relative_error

import flux_megatron
from flux_megatron.errors import WorkspaceError
from flux_megatron.lab.measure.post_training_loop import Loop, Size, packed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need GPUs")

STRATEGY = {"FLUX_MEGATRON_STRATEGY": "hopper" if ON_HOPPER else "fused"}
SIZE, TOTAL = Size(layers=1, vocabulary=2048, least=256, largest=1024, micro_batches=1), 1024
# Of gradients in bf16: torch's backward of attention adds up in any order.
BOUND = 2e-2


class Captured:
    """Log-probabilities, and a training pass, of a micro-batch that stays where it is."""

    def __init__(self, sp: bool) -> None:
        device = here()
        about = SimpleNamespace(dtype="bfloat16")
        self.run = SimpleNamespace(device=device, group=dist.group.WORLD, about=about)
        self.loop = Loop(self.run, "qwen3-8b", sp, SIZE)
        # random states that a graph can have, as Megatron's --te-rng-tracker gives
        model_parallel_cuda_manual_seed(1, use_cudagraphable_rng=True, force_reset_rng=True)
        self.batch = self.drawn(0)
        self.old = torch.zeros(TOTAL, device=device)[None]
        for _ in range(2):
            self.log_probabilities(), self.train()
        torch.cuda.synchronize()
        self.graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
        with torch.cuda.graph(self.graphs[0]):
            self.found = self.log_probabilities()
        with torch.cuda.graph(self.graphs[1]):
            self.grads = self.train()

    def drawn(self, seed: int, total: int = TOTAL):
        return packed(self.run, total, SIZE, random.Random(seed))

    def log_probabilities(self) -> torch.Tensor:
        with torch.no_grad():
            return self.loop.log_probabilities(self.batch)

    def train(self) -> list[torch.Tensor]:
        parameters = [*self.loop.model.parameters()]
        ratio = (self.loop.log_probabilities(self.batch) - self.old).exp()
        return [*torch.autograd.grad((-ratio * self.batch.advantages).mean(), parameters)]

    def renew(self, seed: int) -> None:
        """Other tokens and other weights, where they were."""
        new = self.drawn(seed)
        for name in ("tokens", "labels", "advantages"):
            getattr(self.batch, name).copy_(getattr(new, name))
        with torch.no_grad():
            for parameter in self.loop.model.parameters():
                parameter.mul_(1.01)

    def replay(self) -> None:
        """Both graphs, as a step has them: the first gives what the second is compared with."""
        self.graphs[0].replay()
        self.old.copy_(self.found)
        self.graphs[1].replay()

    def compare(self, seed: int) -> None:
        self.renew(seed)
        self.replay()
        found, grads = self.found.clone(), [grad.clone() for grad in self.grads]
        assert_exact(self.log_probabilities(), found, f"log-probabilities {seed}")
        for grad, expected in zip(grads, self.train(), strict=True):
            assert relative_error(grad, expected) <= BOUND, seed


@pytest.mark.parametrize("sp", [False, True])
@on_device_ranks(2, environment=STRATEGY, fresh=True)
def test_a_captured_step_follows_tokens_and_weights(rank, sp):
    captured = Captured(sp)
    for seed in (1, 2, 3):
        captured.compare(seed)
        kept, captured.batch = captured.batch, captured.drawn(seed, total=512)
        assert captured.log_probabilities().isfinite().all()
        captured.batch = kept
    assert flux_megatron.report().overlapped > 0
    with pytest.raises(WorkspaceError, match="graph"):
        flux_megatron.release()
    captured.graphs.clear()
    torch.cuda.synchronize()
    flux_megatron.release(graphs_dropped=True)
    assert captured.log_probabilities().isfinite().all()

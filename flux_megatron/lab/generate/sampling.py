"""From logits to the next token: the same on all ranks, and inside a CUDA graph."""

from __future__ import annotations

import torch
from torch import Tensor


class Sampler:
    """The likeliest token, or with a temperature a drawn one.

    softmax(logits / T) is drawn from as argmax(logits / T + noise), the noise being Gumbel's. It
    comes from a generator of the CPU, so a seed means the same on any device, rank and arm.
    """

    def __init__(
        self, rows: int, vocab: int, temperature: float, top_k: int, seed: int, device: torch.device
    ) -> None:
        self.temperature, self.top_k = temperature, top_k
        self.noise = torch.zeros(rows, vocab, device=device) if temperature else None
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self) -> None:
        """New noise for the next step. On the host, so outside of a graph."""
        if self.noise is not None:
            drawn = torch.empty(self.noise.shape).exponential_(generator=self._generator)
            self.noise.copy_(-drawn.clamp_min(torch.finfo(drawn.dtype).tiny).log())

    def scores(self, logits: Tensor) -> Tensor:
        """What the next token has the most of: [rows, vocab], from float32 logits of this shape."""
        if self.noise is None:
            return logits
        if self.top_k:
            least = logits.topk(self.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        return logits / self.temperature + self.noise

"""Whether two arms decoded the same tokens, and where not, by how little they differ."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class Decoded(NamedTuple):
    """Of one arm: a prompt's tokens, and for each step what all prompts' were chosen from.

    `tokens[row]` may end early; `logits[step]` and `scores[step]` are [rows, vocab].
    """

    tokens: list[list[int]]
    logits: list[Tensor]
    scores: list[Tensor]


def differences(ours: Decoded, stock: Decoded) -> list[dict[str, Any]]:
    """The first difference of each prompt that has one. All before it is the same in both arms.

    `gap_flux` is by how much the token of ours led stock's in our scores, `gap_stock` the reverse
    in stock's. Two small gaps are a tie that rounding decided.
    """
    found = []
    for row, (a, b) in enumerate(zip(ours.tokens, stock.tokens, strict=True)):
        step = common_steps(a, b)
        if step < max(len(a), len(b)):
            here, there = ours.scores[step][row], stock.scores[step][row]
            mine, theirs = int(here.argmax()), int(there.argmax())
            found.append({
                "prompt": row + 1, "token": step + 1, "flux": mine, "stock": theirs,
                "gap_flux": float(here[mine] - here[theirs]),
                "gap_stock": float(there[theirs] - there[mine]),
            })  # fmt: skip
    return found


def largest_logit_difference(ours: Decoded, stock: Decoded) -> float:
    """Over all logits that both arms computed after the same tokens."""
    largest = 0.0
    for row, (a, b) in enumerate(zip(ours.tokens, stock.tokens, strict=True)):
        after_same = min(common_steps(a, b) + 1, len(ours.logits), len(stock.logits))
        for step in range(after_same):
            gaps = (ours.logits[step][row] - stock.logits[step][row]).abs()
            largest = max(largest, float(gaps.max()))
    return largest


def common_steps(a: list[int], b: list[int]) -> int:
    """How many tokens are the same from the beginning."""
    same = 0
    while same < min(len(a), len(b)) and a[same] == b[same]:
        same += 1
    return same

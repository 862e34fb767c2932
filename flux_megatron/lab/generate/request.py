"""What `flux-megatron generate` is asked for: prompts of a checkpoint. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from flux_megatron.errors import BadInput

MOST_PROMPTS = 64  # rows of a decoding step for which `low_latency` is chosen unmeasured


class Request(NamedTuple):
    """What is decoded, by one arm after another: "flux", "stock"."""

    checkpoint: Path
    prompts: list[str]
    tokens: int
    arms: tuple[str, ...] = ("flux",)


def check_prompts(prompts: list[str], tokens: int, most: int) -> None:
    if len(prompts) > MOST_PROMPTS:
        raise BadInput(f"{len(prompts)} prompts given, at most {MOST_PROMPTS} expected")
    try:
        longest = max(1, *(len(prompt.encode()) for prompt in prompts))  # none: end of document
    except UnicodeEncodeError as error:
        raise BadInput(f"--prompt is no text: {error}") from None
    if longest + tokens > most:
        raise BadInput(
            f"a prompt of {longest} tokens and --tokens {tokens} given, {most} together at most "
            "expected, the model.seq_length of the checkpoint"
        )

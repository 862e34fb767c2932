"""The widths of any model for `flux-megatron tune`: from its own options, or from Megatron's. No
torch.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from flux_megatron.errors import BadInput
from flux_megatron.integration import parser_signature

CPU_SCALE = 512  # divides the widths of all models, and leaves what interpreted kernels can run
NEEDED = ("--hidden-size", "--num-attention-heads")


@dataclass(frozen=True)
class Model:
    """Widths of a model's linear layers.

    `qkv` and `fc1` are outputs of column-parallel layers, `attention` and `ffn` inputs of
    row-parallel ones; fc1 holds gate and up where a model has both.
    """

    hidden: int
    qkv: int
    attention: int
    fc1: int
    ffn: int

    def scaled(self, scale: int) -> Model:
        """The same model with every width divided by `scale`, for machines without GPUs."""
        widths = (self.hidden, self.qkv, self.attention, self.fc1, self.ffn)
        if any(width % scale for width in widths):
            raise BadInput(f"scale {scale} given, a divisor of {widths} expected")
        return Model(*(width // scale for width in widths))


MODELS = {
    "gpt3-175b": Model(12288, 3 * 12288, 12288, 4 * 12288, 4 * 12288),
    # 64 heads and 2 x 8 key-value heads of 128; gate and up of 28672 each
    "llama2-70b": Model(8192, (64 + 2 * 8) * 128, 8192, 2 * 28672, 28672),
}


@dataclass(frozen=True)
class Widths:
    """What a model's layers are made of. `kv_heads` and `head_dim` None: as many heads as `heads`,
    and hidden / heads. `vocab` None: the output layer is left out.
    """

    hidden: int
    ffn: int
    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    swiglu: bool = False
    vocab: int | None = None

    def layers(self, tp: int) -> Model:
        """The linear layers. `BadInput` where the heads are uneven, or `tp` ranks cannot share."""
        kv_heads, head_dim = self.kv_heads or self.heads, self.head_dim
        if head_dim is None:
            if self.hidden % self.heads:
                raise BadInput(
                    f"{self.hidden} wide with {self.heads} heads given, a multiple of the heads or "
                    "the width of a head (--head-dim, Megatron's --kv-channels) expected"
                )
            head_dim = self.hidden // self.heads
        if self.heads % kv_heads:
            raise BadInput(
                f"{kv_heads} key-value heads given, a divisor of the {self.heads} heads expected"
            )
        attention = self.heads * head_dim
        qkv = attention + 2 * kv_heads * head_dim
        shared = {
            "heads": self.heads, "the output of qkv": qkv, "ffn": self.ffn, "hidden": self.hidden,
            "vocab": self.vocab or 0,
        }  # fmt: skip
        for name, width in shared.items():
            if width % tp:
                raise BadInput(f"{name} {width} given, a multiple of the {tp} ranks expected")
        fc1 = 2 * self.ffn if self.swiglu else self.ffn
        return Model(self.hidden, qkv, attention, fc1, self.ffn)

    def __str__(self) -> str:
        numbers = {
            "hidden": self.hidden, "ffn": self.ffn, "heads": self.heads, "kv-heads": self.kv_heads,
            "head-dim": self.head_dim, "vocab": self.vocab,
        }  # fmt: skip
        given = [f"{name}-{number}" for name, number in numbers.items() if number is not None]
        return "_".join([*given, *(["swiglu"] if self.swiglu else [])])


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadInput(f"after --: {message.removeprefix('argument ')}")


def of_megatron(arguments: Sequence[str], vocab: int | None = None) -> tuple[Widths, int | None]:
    """Widths, and the tensor-parallel ranks if given, by the arguments of `pretrain_gpt.py`, with
    Megatron's defaults. Arguments of other things are passed over.
    """
    if not arguments[0].startswith("--"):
        raise BadInput(f"{arguments[0]!r} given, Megatron's arguments behind -- expected")
    parser = _Parser(allow_abbrev=False, add_help=False)
    for name in (
        "hidden-size", "ffn-hidden-size", "num-attention-heads", "num-query-groups", "kv-channels",
        "tensor-model-parallel-size",
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=_size)
    flags = "group-query-attention", "swiglu", "quick-geglu", "multi-latent-attention"
    for name in flags:
        parser.add_argument(f"--{name}", action="store_true")
    found, others = parser.parse_known_args(arguments)
    _check_spelling(others)
    hidden, heads = found.hidden_size, found.num_attention_heads
    lacking = [name for name, size in zip(NEEDED, (hidden, heads), strict=True) if size is None]
    if lacking:
        raise BadInput(f"after --: {' and '.join(lacking)} expected, {' '.join(arguments)!r} given")
    if found.multi_latent_attention:
        raise BadInput("after --: --multi-latent-attention given, whose layers are not known here")
    groups = found.num_query_groups
    if groups is not None and not found.group_query_attention:
        raise BadInput(
            f"after --: --num-query-groups {groups} given without --group-query-attention, without "
            "which Megatron passes it over"
        )
    kv_heads = (groups or 1) if found.group_query_attention else None
    ffn = found.ffn_hidden_size or (hidden * 8 // 3 // 64 * 64 if found.swiglu else 4 * hidden)
    gated = found.swiglu or found.quick_geglu  # Megatron's own ffn is another with the first alone
    widths = Widths(hidden, ffn, heads, kv_heads, found.kv_channels, gated, vocab)
    return widths, found.tensor_model_parallel_size


def _size(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} given, a whole number above 0 expected")
    return int(text)


def _check_spelling(others: Sequence[str]) -> None:
    """`BadInput` for an option that no recorded Megatron has: it may be a width, spelt wrongly."""
    known = parser_signature.known_options()
    for word in others:
        option = word.partition("=")[0]
        if word.startswith("--") and option not in known:
            near = difflib.get_close_matches(option, known, n=1, cutoff=0.7)
            guess = f"{near[0]}? " if near else ""
            raise BadInput(
                f"after --: {option} given, {guess}an option of Megatron's pretrain_gpt.py expected"
            )

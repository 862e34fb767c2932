"""Broken copies of the package, each with one change of its source, that the tests must catch.

The files `*mutants.diff` beside this one list them, but for `source_mutants.diff`; those of
`device_mutants.diff` are of own kernels and their primitives. Each has a name and a hunk, or some
between lines of `@@`; the case that it is run with and the file are those named last. The lines
that a hunk finds (context and minus) must occur exactly once in that file, so a mutant that has
gone stale is an error.

| idea | why it must be caught |
| --- | --- |
| a wait is missing, too weak, or for something else | rows are read before they have arrived |
| a signal is early, lost or misdirected | the same, or nobody ever proceeds |
| a region, a slot or an epoch is mistaken | a peer's next call overwrites what is still read |
| a captured call begins too early | a replay takes old signals, or overwrites what is still read |
| CTAs own tiles, or wait for tiles that no CTA has drawn | a CTA without an SM delays all ranks |
| partials are added twice, too early or not at all | the sum is wrong |
| the two streams are not ordered | the copy engine reads too early, or what has been overwritten |
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from device_ranks import OwnCase
from embedding_ranks import BagsCase
from expert_cases import ExpertCase
from protocol_cases import Case
from signalled_expert_cases import BandCase
from token_cases import TokenCase
from virtual_hosts import VirtualCase
from virtual_machine import Mutation

_THREE = {"world_size": 3, "rows": (20, 11, 11), "N": 16}
# eager, captured and replayed, replayed again, eager, replayed twice
SIX = {"rows": (9,) * 6, "N": 16, "comm_rows": 5, "captured": True}
_WORDS = {"strategy": "low_latency", "rows": (1, 1, 1, 1), "N": 40, "K": 8, "world_size": 3}
BLOCKS = {
    "rows": (13, 20, 20), "N": 144, "K": 272, "comm_rows": 5, "scaled": True, "split": True,
    "blockwise": True,
}  # fmt: skip
_WIRE = {"scaled": True, "wire": True, "rows": (20, 40)}
_ROUNDS = {"world_size": 4, "rows": (20,), "N": 16, "dtype": torch.bfloat16, "rounds": True}

CASES = {
    "ag": Case("ag", bias=True),
    "ag, 3 ranks": Case("ag", **_THREE),
    "ag pipelined": Case("ag", "pipelined", rows=(7, 20, 20), comm_rows=5, bias=True),
    "ag pipelined, one GEMM": Case("ag", "pipelined", parts=1),
    "ag pipelined, blockwise": Case("ag", "pipelined", 3, bias=True, **BLOCKS),
    "ag pipelined, blockwise, one GEMM": Case(
        "ag", "pipelined", parts=1, **{**BLOCKS, "comm_rows": 0}
    ),
    "rs": Case("rs", comm_rows=12),
    "rs, 3 ranks": Case("rs", **_THREE),
    "rs, one communication tile": Case("rs", layout="nn", comm_rows=0),
    # finely interleaved even without preemption
    "rs, a CTA a tile": Case("rs", rows=(40, 40, 40), ctas=1_000),
    "rs pipelined": Case("rs", "pipelined", rows=(7, 20, 20), comm_rows=5),
    "rs pipelined, 3 ranks": Case("rs", "pipelined", **_THREE),
    "hopper rs, e4m3 on the wire": Case("rs", "hopper", **_WIRE),
    "hopper rs by SM, e4m3 on the wire": Case("rs", "hopper", transport="sm", **_WIRE),
    "rs pipelined, blockwise": Case("rs", "pipelined", 3, **BLOCKS),
    "captured ag": Case("ag", **SIX),
    "captured rs": Case("rs", **SIX),
    "captured rs, 3 ranks": Case("rs", world_size=3, **SIX),
    "ag on two streams": Case("ag", rows=(9,) * 5, N=16, two_streams=True),
    "rs on two streams": Case("rs", rows=(9,) * 5, N=16, two_streams=True),
    "backward": Case("backward", rows=(20, 20, 40), layout="nn"),
    "hopper ag": Case("ag", "hopper", rows=(16, 32, 32), bias=True),
    "hopper ag, short tiles": Case("ag", "hopper", rows=(32, 32, 32), K=16),
    # all tiles in three parts, or two of eight
    "hopper ag, split-K": Case("ag", "hopper", rows=(16, 16, 32), K=96, ctas=6),
    # one of six in four parts that differ
    "hopper ag, last wave": Case("ag", "hopper", rows=(16, 16, 16), N=48, K=176, ctas=5),
    "hopper ag, wide tiles": Case(
        "ag", "hopper", rows=(16, 16, 32), N=56, K=96, bias=True, comm_rows=0, layout="nn",
        block_n=32, ctas=6,
    ),
    "hopper ag in parts of K": Case("ag", "hopper", rows=(16, 32, 32), K=112, parts=3, bias=True),
    "hopper ag, ragged shards": Case("ag", "hopper", rows=(20, 33, 47), bias=True, comm_rows=7),
    "ag, FP8": Case("ag", bias=True, scaled=True),
    "rs, FP8": Case("rs", comm_rows=12, scaled=True),
    "hopper ag, FP8": Case("ag", "hopper", rows=(16, 32, 32), bias=True, scaled=True),
    "hopper ag, FP8, split accumulator": Case(
        "ag", "hopper", rows=(32, 16, 48), K=96, ctas=6, scaled=True, split=True
    ),
    "hopper rs, FP8": Case("rs", "hopper", scaled=True),
    "hopper rs, FP8, 3 ranks": Case("rs", "hopper", 3, K=64, scaled=True, split=True),
    "hopper rs": Case("rs", "hopper"),
    "hopper rs, 3 ranks": Case("rs", "hopper", 3, rows=(20, 20, 20), K=64),
    "hopper rs, short K": Case("rs", "hopper", 3, rows=(20, 20), K=32, ctas=2),
    "hopper rs by SM": Case("rs", "hopper", transport="sm"),
    "hopper rs, split-K": Case("rs", "hopper", K=96, ctas=6),
    # with more tiles in a shard than CTAs: whole ones are added while they are multiplied
    "hopper rs, split-K of three waves": Case("rs", "hopper", K=96),
    # 256 + 1 + 1 + 1 is 260 in bf16, and 256 where every addition is rounded
    "hopper rs, rounded once": Case("rs", "hopper", K=64, ctas=1, **_ROUNDS),
    "hopper rs, rounded once behind the last MMA": Case("rs", "hopper", ctas=1_000, **_ROUNDS),
    "hopper ar": Case("ar", "hopper", rows=(32, 32, 41), comm_rows=0),
    "hopper ar, engines": Case(
        "ar", "hopper", 3, (33, 60, 49), N=80, transport="engines", ctas=2
    ),
    "hopper ar, exchanged": Case("ar", "hopper", transport="exchange", K=64),
    "hopper backward by SM": Case(
        "backward", "hopper", rows=(32, 32, 32), layout="nn", transport="sm"
    ),
    "signalled ag": Case("ag", "signalled", group_rows=(5, 4), comm_sms=4, bias=True),
    "signalled ag, 3 ranks": Case("ag", "signalled", 3, rows=(9, 9, 9), group_rows=(4,)),
    "hopper signalled ag": Case(
        "ag", "signalled", rows=(37, 48, 33), N=40, group_rows=(16,), comm_sms=2, gluon=True
    ),
    "hopper signalled ag, 3 ranks": Case(
        "ag", "signalled", 3, rows=(48, 32), N=24, group_rows=(16, 16), bias=True, gluon=True
    ),
    "signalled rs": Case("rs", "signalled", group_rows=(5,)),
    "signalled rs, 3 ranks": Case("rs", "signalled", 3, rows=(9, 9, 9), N=16, group_rows=(4,)),
    "signalled rs on two streams": Case("rs", "signalled", rows=(9,) * 5, two_streams=True),
    "signalled ar": Case("ar", "signalled", group_rows=(16, 7)),
    "hopper signalled rs": Case(
        "rs", "signalled", rows=(32, 48, 16), N=40, group_rows=(16,), gluon=True
    ),
    "hopper signalled ar": Case("ar", "signalled", group_rows=(16,), gluon=True),
    "backward, 3 ranks": Case("backward", **_THREE),
    "mailboxes: ag": Case("ag", "pipelined", rows=(7, 20, 20), comm_rows=5, mailboxes=True),
    "mailboxes: ag, 3 ranks": Case("ag", mailboxes=True, **_THREE),
    "mailboxes: ag in parts of K": Case(
        "ag", "hopper", rows=(16, 32, 32), K=112, parts=3, mailboxes=True
    ),
    "mailboxes: ag, blockwise": Case("ag", "pipelined", mailboxes=True, **BLOCKS),
    "mailboxes: hopper rs, 3 ranks": Case("rs", "hopper", 3, rows=(20, 20, 20), mailboxes=True),
    "mailboxes: hopper ar, engines": Case(
        "ar", "hopper", rows=(32, 32, 48), transport="engines", mailboxes=True
    ),
    "mailboxes: captured ag": Case("ag", "hopper", mailboxes=True, **{**SIX, "rows": (16,) * 6}),
    "a2a": ExpertCase("dispatch"),
    "a2a, 3 ranks": ExpertCase("dispatch", 3, experts=1, most=12),
    "a2a, experts that share a signal": ExpertCase("dispatch", experts=4, most=9, slots=3),
    "a2a by TMA": ExpertCase("dispatch", most=9, tma=True),
    "a2a, reverse": ExpertCase("dispatch", calls=1, most=9, reverse=True),
    "a2a by TMA, reverse": ExpertCase("dispatch", calls=1, most=9, tma=True, reverse=True),
    "a2a, nn, reverse": ExpertCase("dispatch", layout="nn", reverse=True),
    "back": ExpertCase("combine"),
    "back, nn": ExpertCase("combine", layout="nn"),
    "back by TMA, reverse": ExpertCase(
        "combine", experts=3, calls=1, most=9, tma=True, reverse=True
    ),
    "experts, 1 rank": ExpertCase("both", 1, experts=3),
    "experts, 4 ranks": ExpertCase("both", 4, experts=1, calls=2, most=9),
    "back, 3 ranks": ExpertCase("combine", 3, experts=1, most=12),
    "captured experts": ExpertCase("both", experts=1, calls=6, captured=True),
    "hopper a2a": ExpertCase("dispatch", hopper=True),
    "hopper a2a, experts that share a signal": ExpertCase(
        "dispatch", experts=4, most=9, slots=3, hopper=True
    ),
    "hopper a2a, nn": ExpertCase("dispatch", most=9, layout="nn", hopper=True),
    "hopper a2a, nn, reverse": ExpertCase(
        "dispatch", calls=1, most=9, layout="nn", hopper=True, reverse=True
    ),
    "hopper back, reverse": ExpertCase("combine", calls=1, most=9, hopper=True, reverse=True),
    "hopper back": ExpertCase("combine", hopper=True),
    "hopper back, 3 ranks": ExpertCase("combine", 3, experts=1, most=12, hopper=True),
    "signalled a2a": BandCase("dispatch", experts=3, calls=2, most=12),
    "signalled back": BandCase("combine", experts=3, calls=2, most=12),
    "signalled back, 3 ranks": BandCase("combine", 3, calls=2, most=9, bands=3),
    "signalled experts": BandCase("both", 3, experts=1, most=9, bands=2),
    "tokens": TokenCase(),
    "tokens, 1 rank": TokenCase(world_size=1, calls=1),
    "tokens, 3 ranks": TokenCase(world_size=3, experts=1, calls=2, tokens=6),
    "tokens that share signals": TokenCase(slots=2, tokens=18, experts=1, topk=1, calls=1),
    "tokens, reverse": TokenCase(reverse=True, calls=1),
    "captured tokens": TokenCase(captured=True, calls=6, tokens=4, experts=1, topk=1),
    "bags": BagsCase(("forward",)),
    "gradients of bags": BagsCase(("backward",)),
    "both of bags": BagsCase(),
    "bags, 3 ranks": BagsCase(tables=(1, 2, 1), samples=2, slice_samples=1, calls=2),
    "captured bags": BagsCase(samples=3, calls=4, captured=True),
    "bags, one slice": BagsCase(("forward",), samples=4, slice_samples=4, block=4, ctas=1),
    "two shots": Case("ar", rows=(7, 20, 20), comm_rows=5),
    "words": Case("ar", **_WORDS),
    "words of many tiles": Case("ar", **{**_WORDS, "N": 96, "rows": (1, 1)}, ctas=6),
    "words in two phases": Case("ar", **{**_WORDS, "rows": (2, 1, 2, 2)}, two_phase=True),
    "words scattered": Case("rs", **_WORDS),
    "words gathered": Case("ag", **{**_WORDS, "K": 40}),
    "words in parts": Case("ar", **{**_WORDS, "N": 96, "K": 40, "parts": 2}, ctas=6),
    "words gathered in parts": Case("ag", **{**_WORDS, "K": 40, "parts": 2}),
    "captured words": Case("ar", **{**_WORDS, "rows": (1,) * 6}, captured=True),
    "norm": OwnCase(),
    "norm, 3 ranks": OwnCase(world_size=3, calls=2),
    "norm, 1 rank": OwnCase(world_size=1, calls=2),
    "norm, largest epoch as a signed word": OwnCase(last_epoch=2**31 - 3),
    "captured norm": OwnCase(M_shard=3, calls=6, captured=True),
    "barrier": OwnCase("barrier", 3, calls=4),
    "barrier, largest epoch": OwnCase("barrier", last_epoch=2**32 - 3),
    "captured barrier": OwnCase("barrier", calls=6, captured=True),
}  # fmt: skip


def not_of_mutants(cases: Iterable[VirtualCase]) -> list[VirtualCase]:
    """Those that `test_mutants.py` does not run."""
    return [case for case in cases if case not in CASES.values()]


@dataclass(frozen=True)
class Mutant:
    name: str
    case: Case | ExpertCase | BagsCase | OwnCase
    mutation: Mutation

    def __str__(self) -> str:
        return self.name


def hunks(file: Path, what: str) -> Iterator[tuple[str, str, Mutation]]:
    """Of each paragraph, its title in a comment and hunks between `@@`: the title, its `what` and
    the mutation. Lines of `what` and of the file hold until the next ones.
    """
    told: dict[str, str] = {}
    for paragraph in file.read_text().strip().split("\n\n"):
        title, *lines = paragraph.splitlines()
        while found := re.match(rf"# ({what}|file): (.*)", lines[0]):
            told[found[1]] = found[2]
            del lines[0]
        changes = tuple(_change(hunk.splitlines()) for hunk in "\n".join(lines).split("\n@@\n"))
        yield title.removeprefix("# "), told[what], Mutation(told["file"], changes)


def _change(hunk: list[str]) -> tuple[str, str]:
    """What is found, and what it becomes."""
    old = [line[1:] for line in hunk if line[0] in " -"]
    new = [line[1:] for line in hunk if line[0] in " +"]
    return _text(old), _text(new)


def _text(lines: list[str]) -> str:
    """Whole lines, and nothing else: the newline before the first is part of what is found."""
    return "\n" + "".join(f"{line}\n" for line in lines)


HERE = Path(__file__).parent
MUTANTS = [
    Mutant(title, CASES[case], mutation)
    for file in sorted(HERE.glob("*mutants.diff"))
    if file.stem != "source_mutants"
    for title, case, mutation in hunks(file, "case")
]

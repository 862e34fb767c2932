"""What a combination is, and the hand that draws one, of options that the release's parser has."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flux_megatron.integration.parser_signature import recorded


@dataclass(frozen=True)
class Combination:
    """`arguments` go to both arms, `ours` and `stock` to one each. `resume`: whose checkpoint the
    second half of the run loads, of `own`, `stock` and `ours`; None: the run has one part.
    `te`: TransformerEngine's specification, with stand-ins for its classes (te_stand_ins.py).
    """

    arguments: list[str]
    ours: list[str]
    stock: list[str]
    ranks: int
    precision: str
    te: bool = False
    resume: str | None = None


@dataclass
class Hand:
    """Draws, and keeps what was drawn. `facts` is what later draws have to know of earlier ones."""

    rng: random.Random
    parser: dict[str, Any]
    arguments: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def knows(self, option: str) -> bool:
        return option in self.parser

    def give(self, option: str, *values: Any) -> bool:
        """Whether it was given: the release has it and takes it, and it was not given before."""
        kind = self.parser.get(option)
        among = kind.get("choices") if isinstance(kind, dict) else None
        unknown = kind is None or (among is not None and not {*values} <= {*among})
        if unknown or option in self.arguments:
            return False
        self.arguments += [option, *map(str, values)]
        return True

    def has(self, option: str) -> bool:
        return option in self.arguments

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def perhaps(self, share: float, option: str, *among: Any) -> bool:
        """Give the option with this probability, with one of these values if it takes one."""
        if not self.chance(share):
            return False
        return self.give(option, self.rng.choice(among)) if among else self.give(option)

    def one(self, weights: dict[Any, float]) -> Any:
        return self.rng.choices([*weights], [*weights.values()])[0]

    def some(self, among: Sequence[str]) -> list[str]:
        """At least one, in the given order."""
        chosen = set(self.rng.sample(among, self.rng.randint(1, len(among))))
        return [name for name in among if name in chosen]


def draw(release: str, seed: int, number: int) -> Combination:
    """The combination of this number: the same each time."""
    import model_space
    import other_options
    import training_space

    hand = Hand(random.Random(f"{release}/{seed}/{number}"), recorded()[release])
    for part in (model_space, training_space, other_options):
        part.draw(hand)
    facts = hand.facts
    return Combination(
        hand.arguments, training_space.knobs(hand), training_space.of_stock(hand),
        facts["tp"] * facts["pp"] * facts["dp"], facts["precision"], facts["te"],
        facts.get("resume"),
    )  # fmt: skip

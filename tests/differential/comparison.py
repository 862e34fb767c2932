"""What counts as equal: docs/tests.md, and for half precision the rule of random data.

fp32: no loss, norm or weight differs by more than 1e-5, no moment by more than 1e-4 of its norm.
bf16 and fp16: stock in fp32 is the reference. The mean distance of our losses from it, over the
run, is at most twice stock's own, or ours are as near to stock as stock is to the reference. Five
iterations are few: nobody is asked to be nearer than an eighth of the dtype's precision, with norms
twice it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

LOSS, WEIGHT, MOMENT = 1e-5, 1e-5, 1e-4
NOTHING = 1e-2  # of the largest moment's norm: smaller ones are measured against this
EPSILON = {"bf16": 2.0**-8, "fp16": 2.0**-11}
NORMS = ("grad_norm", "params_norm")
EXACT = ("iteration", "skipped_iter", "loss_scale")
UNCOMPARED = ("num_zeros_in_grad",)  # rounding decides what is exactly zero
Record = dict[str, Any]


@dataclass
class Difference:
    """The largest differences by what differs, and what is wrong with them; empty: equal."""

    largest: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def note(self, name: str, value: float, bound: float | None, where: str) -> None:
        if not value <= self.largest.get(name, -1.0):
            self.largest[name] = value
        if bound is not None and not value <= bound:
            self.wrong.append(f"{where}: {name} differs by {value:.2g}, {bound:.0e} allowed")


def compare(
    stock: list[Record], ours: list[Record], reference: list[Record] | None, precision: str = "fp32"
) -> Difference:
    """Of all ranks. `reference`: of a half-precision run, stock's in fp32."""
    found = Difference()
    for rank, (theirs, mine) in enumerate(zip(stock, ours, strict=True)):
        for kind in ("iterations", "evaluations"):
            _of_lists(found, theirs[kind], mine[kind], f"rank {rank}", reference is None)
        if reference is None:
            _of_state(found, theirs["state"], mine["state"], f"rank {rank}")
        else:
            _of_half(found, theirs, mine, reference[rank], EPSILON[precision], f"rank {rank}")
    return found


def _of_lists(
    found: Difference, stock: list[Record], ours: list[Record], where: str, bounded: bool
) -> None:
    if [[*entry] for entry in stock] != [[*entry] for entry in ours]:
        found.wrong.append(f"{where}: {len(stock)} entries of stock, {len(ours)} or others of ours")
        return
    for number, (theirs, mine) in enumerate(zip(stock, ours, strict=True), 1):
        for name, value in theirs.items():
            here = f"{where}, entry {number}"
            if name in UNCOMPARED or (value is None and mine[name] is None):
                continue
            if name in EXACT or value is None or mine[name] is None:
                if value != mine[name]:
                    found.wrong.append(f"{here}: {name} of stock is {value}, of ours {mine[name]}")
                continue
            apart = abs(value - mine[name])
            if name in NORMS:
                apart /= max(1.0, abs(value))
            found.note(_word(name), apart, LOSS if bounded else None, here)


def _of_state(found: Difference, stock: Record, ours: Record, where: str) -> None:
    if [(k, v.shape, v.dtype) for k, v in stock.items()] != [
        (k, v.shape, v.dtype) for k, v in ours.items()
    ]:
        found.wrong.append(f"{where}: weights or the optimizer's state have other names or shapes")
        return
    largest: dict[str, float] = {}
    for name, theirs in stock.items():
        kind = name.split()[-1]
        largest[kind] = max(largest.get(kind, 0.0), float(theirs.double().norm()))
    for name, theirs in stock.items():
        apart, kind = (theirs.double() - ours[name].double()).abs(), name.split()[-1]
        if kind.startswith(("exp_avg", "momentum")):
            # a gradient that is zero but for rounding, such as that of a key's bias
            norm = max(float(theirs.double().norm()), NOTHING * largest[kind], 1e-12)
            found.note("moments", float(apart.norm()) / norm, MOMENT, f"{where}, {name}")
        elif theirs.numel():
            found.note("weights", float(apart.max()), WEIGHT, f"{where}, {name}")


def _of_half(
    found: Difference, stock: Record, ours: Record, reference: Record, epsilon: float, where: str
) -> None:
    lists = [record["iterations"] for record in (stock, ours, reference)]
    if len({len(entries) for entries in lists}) > 1:
        found.wrong.append(f"{where}: the reference has another number of iterations")
        return
    names = {name for entries in lists for entry in entries for name in entry}
    for name in sorted(names - {*EXACT, *UNCOMPARED}):
        values = [[entry.get(name) for entry in entries] for entries in lists]
        there = [each for each in zip(*values, strict=True) if None not in each]
        if not there:  # such as a loss, on other stages than the last
            continue
        curves = torch.tensor(there, dtype=torch.float64).unbind(1)
        theirs, mine, exact = curves
        spread = float((theirs - exact).abs().mean())
        near = min(float((mine - exact).abs().mean()) / 2, float((mine - theirs).abs().mean()))
        bound = 2 * epsilon if name in NORMS else epsilon / 8
        if not near <= max(spread, bound * float(exact.abs().mean())):
            found.wrong.append(f"{where}: {name} of ours is {near:.2g} away, stock's {spread:.2g}")


def _word(name: str) -> str:
    return name.replace("_", " ") if name in NORMS else "loss"

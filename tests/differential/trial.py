"""One combination: its arms are run, and what came of them becomes a row."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from arms import Arms
from comparison import Difference, compare
from drawing import Combination, draw
from server import Server


class Verdict(Exception):
    """`stock fails`, `refused` or `finding`, and why."""

    def __init__(self, outcome: str, why: str) -> None:
        super().__init__(outcome, why)
        self.outcome, self.why = outcome, why


class Trial:
    """All combinations of one release."""

    def __init__(self, checkout: Path, options: Any, folder: Path) -> None:
        self.release, self.options, self.folder = checkout.name, options, folder
        self._checkout = checkout
        self._servers: dict[bool, Server] = {}

    def close(self) -> None:
        for server in self._servers.values():
            server.close()

    def _server(self, te: bool) -> Server:
        if te not in self._servers:
            site = self.options.site
            self._servers[te] = Server(self._checkout, "pretrain_gpt.py", site, te)
        return self._servers[te]

    def row(self, number: int) -> dict[str, Any]:
        """Draw, run and compare; the logs of a finding stay in `options.keep`."""
        combination = draw(self.release, self.options.seed, number)
        here = self.folder / str(number)
        found, calls = Difference(), (0, 0)
        arms = Arms(self._server(combination.te), combination, here, self.options)
        try:
            found, calls = judged(arms, combination)
            outcome, why = "finding" if found.wrong else "equal", "; ".join(found.wrong[:3])
        except Verdict as verdict:
            outcome, why = verdict.outcome, verdict.why
        if outcome == "finding" and self.options.keep:
            kept = self.options.keep / f"{self.release}-{self.options.seed}-{number}"
            shutil.copytree(here, kept, dirs_exist_ok=True)
        shutil.rmtree(here, ignore_errors=True)
        return {
            "table": "differential", "release": self.release, "seed": self.options.seed,
            "number": number, "outcome": outcome, "why": why, "ranks": combination.ranks,
            "precision": combination.precision, "te": combination.te, "resume": combination.resume,
            "overlapped": calls[0], "calls": calls[1],
            "largest": {name: float(f"{value:.2g}") for name, value in found.largest.items()},
            "arguments": " ".join(combination.arguments), "ours": " ".join(combination.ours),
            "stock": " ".join(combination.stock),
        }  # fmt: skip


def judged(arms: Arms, combination: Combination) -> tuple[Difference, tuple[int, int]]:
    """Both arms beside each other, and the calls that overlapped of all; `Verdict` if one ended."""
    _stock(arms, arms.first("stock"))
    try:
        _ours(arms, arms.first("ours"))
    except Verdict as verdict:
        if verdict.outcome == "finding" and not combination.resume:
            _stock_again(arms, None)
        raise
    if combination.resume:
        _resumed(arms, combination.resume)
    reference = None
    if combination.precision != "fp32":
        _stock(arms, arms.first("reference"), "reference")
        if combination.resume:
            _stock(arms, arms.second("reference", "reference"), "reference")
        reference = arms.records("reference")
    ours = arms.records("ours")
    found = compare(arms.records("stock"), ours, reference, combination.precision)
    if found.wrong:
        _stock_again(arms, combination.resume)
    found.wrong += uncounted(ours, combination)
    overlapped, total = (sum(one["calls"][key] for one in ours) for key in ("overlapped", "total"))
    return found, (overlapped, total)


def _stock_again(arms: Arms, resume: str | None) -> None:
    """Ours cannot follow what does not follow itself."""
    _stock(arms, arms.first("again"), "again")
    if resume:
        _stock(arms, arms.second("again", "ours" if resume == "ours" else "again"), "again")
    apart = compare(arms.records("stock"), arms.records("again"), None).wrong
    if apart:
        raise Verdict("stock fails", f"stock beside itself: {apart[0]}")


def _resumed(arms: Arms, source: str) -> None:
    """Each arm from its own checkpoint, or both from the one of `source`."""
    own = source == "own"
    if source == "ours" and not arms.second("stock", "ours").good:
        words = arms.last_words("stock")
        _stock(arms, arms.second("stock", "stock"))
        raise Verdict("finding", f"stock cannot load what ours saved: {words}")
    if source != "ours":
        _stock(arms, arms.second("stock", "stock"))
    _ours(arms, arms.second("ours", "ours" if own else source))


def _stock(arms: Arms, end: Any, arm: str = "stock") -> None:
    if not end.good:
        raise Verdict("stock fails", "hang" if end.hung else f"{arm}: {arms.last_words(arm)}")


def _ours(arms: Arms, end: Any) -> None:
    if end.hung:
        raise Verdict("finding", "hang")
    if not end.good:
        raise Verdict("refused" if arms.refused() else "finding", arms.last_words("ours"))


def uncounted(records: list[dict[str, Any]], combination: Combination) -> list[str]:
    """Calls that neither overlapped nor gave a reason, where no plan was asked to be such."""
    wrong = []
    calls = [record["calls"] for record in records]
    for rank, count in enumerate(calls):
        silent = count["total"] - count["overlapped"] - sum(count["fallbacks"].values())
        if silent and "sequential" not in combination.ours:
            wrong.append(f"rank {rank}: {silent} calls neither overlapped nor gave a reason")
    expected = "--sequence-parallel" in combination.arguments
    expected &= "--flux-layers" not in combination.ours  # a model may have no dense fc1
    if expected and not any(count["total"] for count in calls):
        wrong.append("no call came to our layers")
    return wrong

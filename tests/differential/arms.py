"""The arms of one combination as runs of the server: `stock`, `ours`, `reference`, which is stock
in fp32, and `again`, which is stock once more. A resumed arm is two runs, with a checkpoint between
them.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import training_space
from drawing import Combination
from server import End, Run, Server

# what the parser says, and errors that our code raises on purpose
REFUSAL = re.compile(
    r"--flux-overlap cannot go with|--flux-[a-z-]+ .*given"
    r'|File "[^"]*flux_megatron/[^\n]*\n\s+raise [^\n]*(\n\s[^\n]*)*\n[\w.]*Error: '
)
INTERPRETED = 5  # times as long may our kernels take in Triton's interpreter
ERROR = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b|.*\berror:|  --\S+: ")


class Arms:
    """Runs of one combination in one folder."""

    def __init__(self, server: Server, combination: Combination, here: Path, options: Any) -> None:
        self._server, self._combination, self._here = server, combination, here
        self._options = options

    def first(self, arm: str) -> End:
        """The whole run, or its first half and a checkpoint."""
        if self._combination.resume is None:
            return self._run(arm, f"{arm}-1", [])
        last = str(training_space.HALF)
        saved = ["--save", self._checkpoint(arm), "--save-interval", last, "--exit-interval", last]
        return self._run(arm, f"{arm}-1", saved)

    def second(self, arm: str, source: str) -> End:
        """The second half, from that arm's checkpoint."""
        loaded = ["--load", self._checkpoint(source), "--exit-on-missing-checkpoint"]
        return self._run(arm, f"{arm}-2-from-{source}", loaded)

    def records(self, arm: str) -> list[dict[str, Any]]:
        """Of each rank: iterations of both halves, the state of the last one."""
        records = []
        for rank in range(self._combination.ranks):
            files = sorted(self._here.glob(f"{arm}-*/{rank}.pt"))
            parts = [torch.load(file, weights_only=False) for file in files]
            lists = {
                kind: [entry for part in parts for entry in part[kind]]
                for kind in ("iterations", "evaluations")
            }
            records.append({**parts[-1], **lists, "calls": _sum([part["calls"] for part in parts])})
        return records

    def refused(self) -> bool:
        """Whether ours ended by name."""
        return any(REFUSAL.search(text) for text in self._logs("ours"))

    def last_words(self, arm: str) -> str:
        """The last line with an error of the first rank that has one; of others it is an echo."""
        words = []
        for text in self._logs(arm):
            words += [line for line in text.splitlines() if ERROR.match(line)][-1:]
        words.sort(key=lambda line: "closed by peer" in line)
        return words[0].strip()[:300] if words else "no words"

    def _logs(self, arm: str) -> list[str]:
        logs = sorted(self._here.glob(f"{arm}-*/*.log"))
        return [log.read_text(errors="replace") for log in logs]

    def _run(self, arm: str, name: str, more: list[str]) -> End:
        wanted = self._combination
        stock = [*wanted.arguments, *wanted.stock]
        arguments = {
            "stock": stock,
            "again": stock,
            "ours": [*wanted.arguments, *wanted.ours],
            "reference": [*training_space.in_fp32(wanted), *wanted.stock],
        }[arm]
        cache = ["--data-cache-path", str(self._here / "cache")]
        limit = self._options.limit * (INTERPRETED if arm == "ours" else 1)
        given, folder = [*arguments, *cache, *more], str(self._here / name)
        return self._server.run(Run(given, wanted.ranks, folder, limit))

    def _checkpoint(self, arm: str) -> str:
        return str(self._here / f"checkpoint of {arm}")


def _sum(calls: list[dict[str, Any]]) -> dict[str, Any]:
    fallbacks = sum((Counter(one["fallbacks"]) for one in calls), Counter())
    return {
        **{key: sum(one[key] for one in calls) for key in ("total", "overlapped")},
        "fallbacks": dict(fallbacks),
    }  # fmt: skip

"""Rows of docs/results, and the races in them: rows of arms that ran against each other.

Rows stand in a file in the order in which they were measured, so a later race of a case replaces an
earlier one: pages and pictures show the newest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Case = tuple[str, ...]
MODELS = {
    "gpt3-175b": "GPT-3 175B", "llama2-70b": "Llama-2 70B", "llama3-8b": "Llama-3 8B",
    "qwen3-8b": "Qwen3-8B", "qwen3-14b": "Qwen3-14B", "qwen3-32b": "Qwen3-32B",
    "qwen3-30b-a3b": "Qwen3-30B-A3B", "gpt-oss-20b": "gpt-oss-20b", "mixtral-8x7b": "Mixtral 8x7B",
}  # fmt: skip


@dataclass(frozen=True)
class Race:
    """A case on some GPUs, and the row of each of its arms."""

    gpus: str
    case: Case
    of: tuple[str, str | None]  # commit and run
    arms: dict[str, Row] = field(default_factory=dict)

    @property
    def commit(self) -> str:
        return self.of[0]

    def time(self, arm: str, of: str = "median_us") -> str:
        return f"{self.arms[arm][of]:.1f}" if arm in self.arms else "-"

    def over(self, baseline: str, arm: str, of: str = "median_us") -> str:
        """How many times as fast as the baseline the arm is."""
        return f"{self.arms[baseline][of] / self.arms[arm][of]:.3f}"


def rows(results: Path, *names: str) -> Iterator[tuple[str, str, Row]]:
    """GPUs, such as "2 x H200", name of the file, and row, of the files of these names."""
    for name in names:
        for file in sorted(results.glob(f"*/{name}.jsonl")):
            gpu, _, count = file.parent.name.partition("x")
            for line in file.read_text(encoding="utf-8").splitlines():
                yield f"{count or 1} x {gpu.upper()}", name, json.loads(line)


def races(
    results: Path,
    names: tuple[str, ...],
    case_and_arm: Callable[[str, Row], tuple[Case, str] | None],
    needed: tuple[str, ...],
) -> list[Race]:
    """The newest race of each case that has the needed arms. `case_and_arm` is given the name of a
    file and a row, and gives None where the row belongs to no case.
    """
    begun: list[Race] = []
    last: dict[Case, Race] = {}
    for gpus, name, row in rows(results, *names):
        if (found := case_and_arm(name, row)) is None:
            continue
        (case, arm), of = found, (row["commit"], row.get("run"))
        key = (gpus, *case)
        race = last.get(key)
        if race is None or race.of != of or arm in race.arms:
            race = last[key] = Race(gpus, case, of)
            begun.append(race)
        race.arms[arm] = row
    whole = (race for race in begun if {*needed} <= race.arms.keys())
    newest = {(race.gpus, race.case): race for race in whole}
    return sorted(newest.values(), key=_in_order)


def _in_order(race: Race) -> list[str | int]:
    """Numbers in their order, words in theirs."""
    words = re.split(r"(\d+)", " ".join((race.gpus, *race.case)))
    return [int(word) if at % 2 else word for at, word in enumerate(words)]


def model(name: str) -> str:
    return MODELS[re.sub(r"-\d+-layers$", "", name)]


def gain(race: Race) -> tuple[str, str, str]:
    """Of ours over stock, and its 95 % interval, as the row rounds them."""
    found = re.findall(r"\d\.\d{3}", race.arms["flux"]["speedup"])
    return found[0], found[1], found[2]


def iterations(results: Path) -> list[Race]:
    """Whole iterations of Megatron's scripts: type, layers of, ranks, model, layers, tokens, and
    ", driver calls by Python" where no row has them made as they are today.
    """

    def case_and_arm(name: str, row: Row) -> tuple[Case, str] | None:
        if "arm" not in row or "for an interval" in row.get("speedup", ""):  # too few pairs
            return None
        dp = row.get("dp", 1)
        case = (
            "FP8" if name == "fp8_iterations" else "bf16",
            row.get("transformer_impl", "transformer_engine"),
            f"TP {row['tp']}" + (f" x DP {dp}" if dp > 1 else ""), model(row["model"]),
            str(row["layers"]), f"{row['M']} x {row.get('micro_batches', 1)}",
            "" if row.get("native", "all") == "all" else ", driver calls by Python",
        )  # fmt: skip
        return case, row["arm"]

    found = races(results, ("iterations", "fp8_iterations"), case_and_arm, ("stock", "flux"))
    today = {(race.gpus, race.case[:-1]) for race in found if not race.case[-1]}
    return [race for race in found if not race.case[-1] or (race.gpus, race.case[:-1]) not in today]


def hidden_shares(results: Path) -> list[Race]:
    """Calls of GPT-3's MLP, TP 4, beside peers: E by M. The case is the call and M."""

    def case_and_arm(_: str, row: Row) -> tuple[Case, str] | None:
        call = {"ag_gemm fc1": "AG+GEMM", "gemm_rs fc2": "GEMM+RS"}.get(
            f"{row['pattern']} {row['op']}"
        )
        if row["suite"] != "gpt3-175b" or call is None or row["M"] < 1024:
            return None
        return (call, str(row["M"])), row["candidate"]

    needed = ("auto", "te_ring", "async_tp")
    return races(results, ("operators_connections-unset",), case_and_arm, needed)

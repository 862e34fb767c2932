"""What docs/tuning.md says of the shipped entries, counted anew."""

from __future__ import annotations

import re
import statistics
from pathlib import Path
from types import SimpleNamespace

import torch

from flux_megatron import shipped
from flux_megatron.overlap import registry
from flux_megatron.tuning import plan_cache
from flux_megatron.tuning.plan_entry import Entry
from flux_megatron.tuning.plan_table import LOG2_MANY, racers, ruled

PAGE = Path(__file__).parents[1] / "docs" / "tuning.md"
PREFERENCE = ("hopper", "fused", "pipelined", "signalled", "low_latency")


def behind(entry: Entry) -> tuple[float, float] | None:
    """By how many percent the rule's plan, and the best that a race tries, are slower than the
    fastest one of an entry; None where the rule's plan was not measured.
    """
    times = {one.plan: one.median_us for one in entry.measured}
    tried = {plan.strategy for plan in times} & {*registry.STRATEGIES[entry.problem.pattern]}
    names = [name for name in PREFERENCE if name in tried]
    rule = times.get(ruled(entry.problem, names))
    if rule is None:
        return None
    raced = min(times[plan] for plan in racers(entry.problem, names) if plan in times)
    fastest = min(times.values())
    return 100 * (rule / fastest - 1), 100 * (raced / fastest - 1)


def like(value: float, printed: str) -> str:
    """With as many digits behind the point, and a 0 before it only where it has one."""
    text = f"{value:.{len(printed.partition('.')[2])}f}"
    return text.removeprefix("0") if printed[0] == "." else text


def test_the_table_of_the_page_is_what_the_entries_have(monkeypatch):
    sms = SimpleNamespace(multi_processor_count=132, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: sms)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    folders = [one for one in (shipped.folder("configs") / "tuned").iterdir() if one.is_dir()]
    entries, _ = plan_cache.read_folders(*folders)
    text = PAGE.read_text()
    columns = re.findall(r"(\d+) of (\d+) entries", text)
    rows = [re.findall(r"([\d.]+) %", line) for line in text.splitlines() if "% at most" in line]
    for column, few in enumerate((False, True)):
        of_range = [entry for entry in entries if (entry.problem.M < 1 << LOG2_MANY) is few]
        found = [one for one in map(behind, of_range) if one is not None]
        assert columns[column] == (str(len(found)), str(len(of_range)))
        for row, percent in zip(rows, zip(*found, strict=True), strict=True):
            printed = row[2 * column : 2 * column + 2]
            assert printed == [*map(like, (statistics.mean(percent), max(percent)), printed)]

"""The page of benchmarks: plots, targets and every row, losses included. It is generated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from flux_megatron.bench import check, records, targets
from flux_megatron.bench.markdown import folded, table
from flux_megatron.bench.plots import TITLES
from flux_megatron.bench.records import LIBRARY, MISSING, OK, UNSUPPORTED, Provenance, Row

# they only multiply: E says nothing of them
GEMMS = ("ours_gemm", *targets.GEMM_PEERS)


def write(out: Path, plots: Sequence[Path], rows: Sequence[Row], sources: Sequence[Path]) -> None:
    """Write OUT.md beside the folder OUT of plots."""
    command = f"flux-megatron plot {' '.join(map(str, sources))} --out {out}"
    parts = [
        "# Benchmarks",
        f"`{command}` writes this page from committed rows; do not edit it. "
        "[speed.md](speed.md) has the short answer, [measuring.md](measuring.md) the protocol and "
        "the definition of E. Times are medians, in microseconds, of the slowest rank of each "
        "round. E stands in brackets, **bold where a candidate is slower than NCCL**. Rows called "
        "*beside* ran beside an NCCL all-reduce, their baselines too.",
        _runs(rows),
        "## Targets",
        _targets(rows),
        *_plots(out, plots),
        "## All rows",
        *_tables(rows, beside=False),
        *_tables(rows, beside=True),
    ]
    out.with_suffix(".md").write_text("\n\n".join(parts) + "\n")


def _runs(rows: Iterable[Row]) -> str:
    runs: dict[str, Provenance] = {}
    for row in rows:
        runs.setdefault(row.provenance.run, row.provenance)
    return table(
        ["run", "date", "commit", "GPUs", "driver", "torch", "Triton", "NCCL", "NVLS",
         "CUDA_DEVICE_MAX_CONNECTIONS", "power limit"],
        [
            [p.run, p.date[:16], p.commit, f"{p.world_size} x {p.gpu}", p.driver, p.torch, p.triton,
             p.nccl, p.nvls, p.max_connections, f"{p.power_limit_w or 0:.0f} W"]
            for p in runs.values()
        ],
    )  # fmt: skip


def _targets(rows: Iterable[Row]) -> str:
    """A line a target of the patterns that have rows: for each value of connections how many cases
    meet it, and worst and best.
    """
    rows = [*rows]
    verdicts = check.check(rows, rows[0].provenance.world_size)
    judged = {one.case.pattern for one in verdicts if one.outcome.verdict != check.MISSING}
    verdicts = [one for one in verdicts if one.case.pattern in judged]
    lines = []
    for target in dict.fromkeys(verdict.target for verdict in verdicts):
        line = [target]
        for connections in targets.CONNECTIONS:
            some = [
                verdict.outcome
                for verdict in verdicts
                if (verdict.target, verdict.connections) == (target, connections)
            ]
            values = [outcome.value for outcome in some if outcome.value is not None]
            met = sum(outcome.verdict == check.MET for outcome in some)
            absent = sum(outcome.verdict == check.MISSING for outcome in some)
            line += [f"{met} of {len(some)}" + (f", {absent} missing" if absent else "")]
            line += [f"{min(values):.3f} .. {max(values):.3f}" if values else "-"]
        lines.append(line)
    header = ["target"]
    for connections in targets.CONNECTIONS:
        header += [f"connections {connections}: met", "values"]
    return folded(f"{len(lines)} targets", table(header, lines))


def _plots(out: Path, plots: Sequence[Path]) -> list[str]:
    parts = []
    for name, title in TITLES.items():
        files = [file for file in plots if file.name.startswith(f"{name}_")]
        if files:
            parts.append(f"## {title}")
            parts += [f"![{title}, {file.stem}]({out.name}/{file.name})" for file in files]
    return parts


def _tables(rows: Iterable[Row], beside: bool) -> list[str]:
    """A table for each connections, pattern and suite: a line a case, a column a candidate."""
    blocks: dict[tuple[str, str, str], list[dict[str, Row]]] = {}
    for (connections, (suite, pattern, _, _)), group in records.latest(rows, beside).items():
        blocks.setdefault((connections, pattern, suite), []).append(group)
    parts = []
    for (connections, pattern, suite), groups in sorted(blocks.items()):
        parts.append(f"### {pattern}{' beside' * beside}, {suite}, connections {connections}")
        names = [*dict.fromkeys(name for group in groups for name in group)]
        header = ["layer", "M x N x K", *names, "plan of auto", "host time"]
        lines = [_line(group, names) for group in groups]
        parts.append(folded(f"{len(lines)} cases", table(header, lines)))
    return parts


def _line(group: dict[str, Row], names: Sequence[str]) -> list[str]:
    first = next(iter(group.values()))
    auto = group.get("auto")
    plan = auto.plan["strategy"] if auto and auto.plan else "-"
    host = f"{auto.host_us:.0f}" if auto and auto.host_us else "-"
    shape = f"{first.M} x {first.N_local} x {first.K_local} {first.layout}"
    return [first.op, shape, *(_cell(group.get(name)) for name in names), plan, host]


def _cell(row: Row | None) -> str:
    if row is None or row.status in (MISSING, UNSUPPORTED):
        return "-"
    if row.status != OK or row.median_us is None:
        return f"**{row.status}**"
    text = f"{row.median_us:.0f}"
    if row.efficiency is None or row.role == LIBRARY or row.candidate in GEMMS:
        return text
    text += f" ({row.efficiency:.2f})"
    return f"**{text}**" if row.efficiency < 0 else text

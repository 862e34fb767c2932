"""The roofline of rows: what a GPU computes over what it receives."""

from __future__ import annotations

from typing import Any

from flux_megatron.bench import suites
from flux_megatron.bench.panels import COLOURS, SERIAL, Cases, candidates, panels
from flux_megatron.bench.records import Row
from flux_megatron.perf import hardware


def draw(cases: Cases) -> Any:
    """TFLOP/s over FLOP per byte that a rank receives, under the roofs of the GEMM and the link."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    gpu = next(iter(next(iter(cases.values())).values())).provenance.gpu
    facts = hardware.find(gpu, "nvlink")
    if facts is None:
        return None
    figure, (axis,) = panels(1, 1, width=9, height=5)
    for place, name in enumerate(["serial", *candidates(cases.values())]):
        rows = [group[name] for group in cases.values() if name in group]
        aside = 1.03**place  # the same for every M: one beside the other is easier to read
        points = [(_intensity(row) * aside, _tflops(row)) for row in rows if row.median_us]
        if points:
            colour = COLOURS.get(name, SERIAL)
            axis.scatter(*zip(*points, strict=True), s=14, color=colour, label=name)
    roof = facts.tflops["bfloat16"]
    ridge = roof * 1e3 / facts.copy_gbps  # FLOP per byte where the link is as fast as the GEMM
    low, high = ridge / 4, max(3 * ridge, axis.get_xlim()[1])
    axis.plot([low, ridge], [low * facts.copy_gbps / 1e3, roof], "k--", lw=1)
    axis.plot([ridge, high], [roof, roof], "k-", lw=1)
    link = f"link: {facts.copy_gbps:.0f} GB/s received"
    axis.annotate(link, (low, low * facts.copy_gbps / 1e3), size=8, va="top", xytext=(8, 0),
                  textcoords="offset points")  # fmt: skip
    axis.annotate(f"GEMM: {roof:.0f} TFLOP/s, bfloat16", (high, roof), size=8, ha="right",
                  xytext=(0, 4), textcoords="offset points")  # fmt: skip
    axis.set(xscale="log", yscale="log", ylabel="TFLOP/s of one GPU")
    axis.set_xlabel("FLOP per byte that a GPU receives")
    for scale in (axis.xaxis, axis.yaxis):
        scale.set_major_locator(LogLocator(subs=(1, 2, 5)))
        scale.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        scale.set_minor_locator(NullLocator())
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3)
    return figure


def _flop(row: Row) -> float:
    gemms = 2 if row.pattern == "backward" else 1
    return 2.0 * row.M * row.N_local * row.K_local * gemms


def _intensity(row: Row) -> float:
    """FLOP per byte of 2-byte elements that this rank receives from the others."""
    column = row.op in suites.COLUMN
    width = row.N_local if row.pattern == "gemm_rs" else row.K_local
    if row.pattern == "backward":  # column: gather of x and scatter of dx; row: gather of dy
        width = 2 * row.K_local if column else row.N_local
    world_size = row.provenance.world_size
    received = row.M * (world_size - 1) / world_size * width * 2
    return _flop(row) / received


def _tflops(row: Row) -> float:
    assert row.median_us is not None, "asked for rows with times"
    return _flop(row) / row.median_us / 1e6

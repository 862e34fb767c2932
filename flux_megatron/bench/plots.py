"""Plots of rows: PNG files, a set for each value of CUDA_DEVICE_MAX_CONNECTIONS, alone
and beside others."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flux_megatron.bench import records, roofline
from flux_megatron.bench.panels import COLOURS, SERIAL, Cases, candidates, machine, panels
from flux_megatron.bench.records import Row

OVERLAPPED = ("ag_gemm", "gemm_rs", "backward")  # the patterns that communicate
LEAST_E = -0.5  # of a plot's axis: lower values get a mark at this edge


def draw(rows: Iterable[Row], folder: Path) -> list[Path]:
    """Draw the latest run of every case, in separate plots alone and beside other kernels; returns
    the files.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    rows = [*rows]
    settings: dict[tuple[str, bool], Cases] = {}
    for beside in (False, True):
        for (connections, key), group in records.latest(rows, beside).items():
            settings.setdefault((connections, beside), {})[key] = group
    files = []
    for (connections, beside), cases in settings.items():
        for pattern in OVERLAPPED:
            some = {key: group for key, group in cases.items() if key[1] == pattern}
            for name, plot in PLOTS.items():
                if some and (figure := plot(some)) is not None:
                    title = f"{pattern}, CUDA_DEVICE_MAX_CONNECTIONS {connections}"
                    title += ", beside an all-reduce" * beside
                    figure.suptitle(f"{TITLES[name]}: {title}, {machine(some)}", fontsize=10)
                    file = f"{name}_{pattern}_connections-{connections}{'_beside' * beside}.png"
                    files.append(folder / file)
                    _save(figure, files[-1])
    return files


def efficiency_by_shape(cases: Cases) -> Any:
    """Bars of E: a panel for each of three sizes, a group of bars for each layer."""
    Ms = sorted({M for *_, M in cases}, reverse=True)
    Ms = [M for M in (8192, 2048, 1024) if M in Ms] or Ms[:1]
    figure, axes = panels(len(Ms), 1, width=11, height=2.6)
    for axis, M in zip(axes, Ms, strict=True):
        layers = [key for key in cases if key[3] == M]
        names = candidates(cases[key] for key in layers)
        for place, name in enumerate(names):
            values = [_efficiency(cases[key].get(name)) for key in layers]
            at = [i + _offset(place, len(names)) for i in range(len(layers))]
            axis.bar(at, values, 0.8 / len(names), color=COLOURS[name], label=name)
            _mark_clipped(axis, at, values, "black")
        axis.set_xticks(range(len(layers)), [f"{suite}\n{op}" for suite, _, op, _ in layers])
        axis.set_title(f"M = {M}", fontsize=9, loc="left")
        _e_axis(axis)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=7)
    return figure


def efficiency_over_M(cases: Cases) -> Any:
    """E over M, a panel for each layer."""
    layers = [*dict.fromkeys((suite, op) for suite, _, op, _ in cases)]
    figure, axes = panels(-(-len(layers) // 4), min(4, len(layers)), width=2.9, height=2.5)
    names = candidates(cases.values())
    Ms = sorted({M for *_, M in cases})
    for axis, (suite, op) in zip(axes, layers, strict=False):
        some = {key[3]: group for key, group in cases.items() if (key[0], key[2]) == (suite, op)}
        for place, name in enumerate(names):
            values = [_efficiency(some.get(M, {}).get(name)) for M in Ms]
            axis.plot(range(len(Ms)), values, "o-", ms=3, lw=1.2, color=COLOURS[name], label=name)
            _mark_clipped(axis, range(len(Ms)), values, COLOURS[name], place)
        axis.set_xticks(range(len(Ms)), Ms, rotation=45)
        axis.set_title(f"{suite} {op}", fontsize=9)
        _e_axis(axis)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=7)
    return figure


def time_split(cases: Cases) -> Any:
    """T over T_gemm at the largest M: the GEMM, and the exposed time above it."""
    largest = max(M for *_, M in cases)
    layers = [key for key in cases if key[3] == largest]
    names = ["serial", *candidates(cases[key] for key in layers)]
    figure, (axis,) = panels(1, 1, width=11, height=4)
    for place, name in enumerate(names):
        for i, key in enumerate(layers):
            row = cases[key].get(name)
            if row is None or row.median_us is None or not row.gemm_us:
                continue
            at, width = i + _offset(place, len(names)), 0.75 / len(names)
            exposed = row.median_us / row.gemm_us - 1
            axis.bar(at, 1, width, color="#d5d8dc")
            axis.bar(at, exposed, width, bottom=1, color=COLOURS.get(name, SERIAL))
            axis.text(at, 1 + max(exposed, 0), f" {exposed:.0%}", rotation=90, size=6, ha="center")
    for name in names:
        axis.bar(0, 0, color=COLOURS.get(name, SERIAL), label=f"{name}: exposed")
    axis.bar(0, 0, color="#d5d8dc", label="GEMM")
    axis.set_xticks(range(len(layers)), [f"{suite}\n{op}" for suite, _, op, _ in layers])
    axis.set_ylabel(f"T / T_gemm at M = {largest}")
    axis.set_ylim(0.5, None)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


PLOTS = {
    "efficiency": efficiency_by_shape,
    "over_M": efficiency_over_M,
    "split": time_split,
    "roofline": roofline.draw,
}
TITLES = {
    "efficiency": "Overlap efficiency E",
    "over_M": "Overlap efficiency E over M",
    "split": "Time split",
    "roofline": "Roofline",
}


def _save(figure: Any, file: Path) -> None:
    """With few colours: a third of the bytes."""
    from PIL import Image

    figure.savefig(file, dpi=80)
    with Image.open(file) as image:
        image.convert("RGB").quantize(64).save(file, optimize=True)


def _offset(place: int, count: int) -> float:
    """Of a bar from the middle of its group."""
    return (place - count / 2 + 0.5) * 0.8 / count


def _efficiency(row: Row | None) -> float:
    return float("nan") if row is None or row.efficiency is None else row.efficiency


def _mark_clipped(
    axis: Any, at: Iterable[float], values: Iterable[float], colour: str, line: int = 0
) -> None:
    """A triangle at the edge for each value below it, with the value in `line` above the edge."""
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.4, "alpha": 0.8}
    for x, value in zip(at, values, strict=True):
        if value < LEAST_E:
            axis.plot(x, LEAST_E, "kv", ms=4, clip_on=False, zorder=3)
            y = LEAST_E + 0.08 + 0.1 * line
            axis.text(x, y, f"{value:.1f}", size=5, ha="center", color=colour, bbox=box)


def _e_axis(axis: Any) -> None:
    """From LEAST_E to a little above 1."""
    axis.set_ylim(LEAST_E, 1.1)
    axis.axhline(1, color="k", lw=0.6)
    axis.axhline(0, color="k", lw=0.6, ls=":")
    axis.tick_params(labelsize=8)

"""Plots of rows: PNG files, a set for each value of CUDA_DEVICE_MAX_CONNECTIONS, alone
and beside others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from flux_megatron.bench import records, suites
from flux_megatron.bench.records import OK, Row
from flux_megatron.perf import hardware

OVERLAPPED = ("ag_gemm", "gemm_rs", "backward")  # the patterns that communicate
COLOURS = {
    "auto": "#c0392b",
    "megatron": "#7f8c8d",
    "async_tp": "#2980b9",
    "te_ring": "#27ae60",
    "te": "#27ae60",
    "te_pipeline": "#a2d9a5",
    "xformers": "#8e44ad",
}
Key = tuple[str, str, str, int]
Cases = dict[Key, dict[str, Row]]


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
                    figure.suptitle(f"{TITLES[name]}: {title}")
                    file = f"{name}_{pattern}_connections-{connections}{'_beside' * beside}.png"
                    files.append(folder / file)
                    _save(figure, files[-1])
    return files


def efficiency_by_shape(cases: Cases) -> Any:
    """Bars of E: a panel for each of three sizes, a group of bars for each layer."""
    Ms = sorted({M for *_, M in cases}, reverse=True)
    Ms = [M for M in (8192, 2048, 1024) if M in Ms] or Ms[:1]
    figure, axes = _panels(len(Ms), 1, width=11, height=2.6)
    for axis, M in zip(axes, Ms, strict=True):
        layers = [key for key in cases if key[3] == M]
        names = _names(cases[key] for key in layers)
        for place, name in enumerate(names):
            values = [_efficiency(cases[key].get(name)) for key in layers]
            at = [i + _offset(place, len(names)) for i in range(len(layers))]
            axis.bar(at, values, 0.8 / len(names), color=COLOURS[name], label=name)
        axis.set_xticks(range(len(layers)), [f"{suite}\n{op}" for suite, _, op, _ in layers])
        axis.set_title(f"M = {M}", fontsize=9, loc="left")
        _e_axis(axis)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=7)
    return figure


def efficiency_over_M(cases: Cases) -> Any:
    """E over M, a panel for each layer."""
    layers = [*dict.fromkeys((suite, op) for suite, _, op, _ in cases)]
    figure, axes = _panels(-(-len(layers) // 4), min(4, len(layers)), width=2.9, height=2.5)
    names = _names(cases.values())
    Ms = sorted({M for *_, M in cases})
    for axis, (suite, op) in zip(axes, layers, strict=False):
        some = {key[3]: group for key, group in cases.items() if (key[0], key[2]) == (suite, op)}
        for name in names:
            values = [_efficiency(some.get(M, {}).get(name)) for M in Ms]
            axis.plot(range(len(Ms)), values, "o-", ms=3, lw=1.2, color=COLOURS[name], label=name)
        axis.set_xticks(range(len(Ms)), Ms, rotation=45)
        axis.set_title(f"{suite} {op}", fontsize=9)
        _e_axis(axis)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=7)
    return figure


def time_split(cases: Cases) -> Any:
    """T over T_gemm at the largest M: the GEMM, and the exposed time above it."""
    largest = max(M for *_, M in cases)
    layers = [key for key in cases if key[3] == largest]
    names = ["serial", *_names(cases[key] for key in layers)]
    figure, (axis,) = _panels(1, 1, width=11, height=4)
    for place, name in enumerate(names):
        for i, key in enumerate(layers):
            row = cases[key].get(name)
            if row is None or row.median_us is None or not row.gemm_us:
                continue
            at, width = i + _offset(place, len(names)), 0.75 / len(names)
            exposed = row.median_us / row.gemm_us - 1
            axis.bar(at, 1, width, color="#d5d8dc")
            axis.bar(at, exposed, width, bottom=1, color=COLOURS.get(name, "#2c3e50"))
            axis.text(at, 1 + max(exposed, 0), f" {exposed:.0%}", rotation=90, size=6, ha="center")
    for name in names:
        axis.bar(0, 0, color=COLOURS.get(name, "#2c3e50"), label=f"{name}: exposed")
    axis.bar(0, 0, color="#d5d8dc", label="GEMM")
    axis.set_xticks(range(len(layers)), [f"{suite}\n{op}" for suite, _, op, _ in layers])
    axis.set_ylabel(f"T / T_gemm at M = {largest}")
    axis.set_ylim(0.5, None)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def roofline(cases: Cases) -> Any:
    """TFLOP/s over FLOP per byte that a rank receives, under the roofs of the GEMM and the link."""
    gpu = next(iter(next(iter(cases.values())).values())).provenance.gpu
    facts = hardware.find(gpu, "nvlink")
    if facts is None:
        return None
    figure, (axis,) = _panels(1, 1, width=9, height=5)
    for place, name in enumerate(["serial", *_names(cases.values())]):
        rows = [group[name] for group in cases.values() if name in group]
        aside = 1.03**place  # the same for every M: one beside the other is easier to read
        points = [(_intensity(row) * aside, _tflops(row)) for row in rows if row.median_us]
        if points:
            colour = COLOURS.get(name, "#2c3e50")
            axis.scatter(*zip(*points, strict=True), s=14, color=colour, label=name)
    roof = facts.tflops["bfloat16"]
    xs = [10**exponent for exponent in (3, 3.34, 4, 4.5)]
    link = [min(roof, x * facts.copy_gbps / 1e3) for x in xs]
    roofs = f"link {facts.copy_gbps:.0f} GB/s, GEMM {roof:.0f} TFLOP/s"
    axis.plot(xs, link, "k--", lw=1, label=roofs)
    axis.set(xscale="log", yscale="log", ylabel="TFLOP/s of one GPU")
    axis.set_xlabel("FLOP per byte that a GPU receives")
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3)
    return figure


PLOTS = {
    "efficiency": efficiency_by_shape,
    "over_M": efficiency_over_M,
    "split": time_split,
    "roofline": roofline,
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


def _panels(rows: int, columns: int, width: float, height: float) -> tuple[Any, Sequence[Any]]:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(width * columns, height * rows + 0.4),
        squeeze=False,
        layout="constrained",
    )
    plt.close(figure)  # it lives on without pyplot
    return figure, [*axes.flat]


def _names(groups: Iterable[dict[str, Row]]) -> list[str]:
    """The candidates of a plot: `auto`, Megatron, and every competitor that has run."""
    seen = {row.candidate for group in groups for row in group.values() if row.status == OK}
    return [name for name in COLOURS if name in seen]


def _offset(place: int, count: int) -> float:
    """Of a bar from the middle of its group."""
    return (place - count / 2 + 0.5) * 0.8 / count


def _efficiency(row: Row | None) -> float:
    return float("nan") if row is None or row.efficiency is None else row.efficiency


def _e_axis(axis: Any) -> None:
    """From -0.5 to 1: lower values are drawn at the edge."""
    axis.set_ylim(-0.5, 1.05)
    axis.axhline(1, color="k", lw=0.6)
    axis.axhline(0, color="k", lw=0.6, ls=":")
    axis.tick_params(labelsize=8)


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

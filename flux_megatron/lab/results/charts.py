"""The pictures of docs/pictures that show rows of docs/results, by matplotlib.

Ours is the strongest colour of each. The sketches beside them are edited by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flux_megatron.lab.results.committed import Race, gain, hidden_shares, iterations

OURS, INK = "#0b6e4f", "#1f2933"
ARMS = {"ours": ("auto", OURS, 3), "userbuffers": ("te_ring", "#e0a030", 1.6),
        "torch async-TP": ("async_tp", "#7f9fc4", 1.6)}  # fmt: skip
STYLE: Any = {
    "font.size": 11, "text.color": INK, "axes.labelcolor": INK, "figure.titlesize": 12,
    "figure.titleweight": "bold", "axes.titlesize": 11, "axes.spines.top": False,
    "axes.spines.right": False, "axes.axisbelow": True, "axes.grid": True, "grid.color": "#e3e8ee",
    "svg.fonttype": "none", "svg.hashsalt": "flux_megatron", "font.family": "sans-serif",
}  # fmt: skip


def write(root: Path) -> None:
    """All pictures, in the same bytes wherever matplotlib is the same."""
    import matplotlib
    from matplotlib.figure import Figure

    for name, (height, draw) in CHARTS.items():
        with matplotlib.rc_context(STYLE):
            figure = Figure(figsize=(8.6, height), layout="constrained")
            draw(figure, root / "docs/results")
            figure.savefig(root / f"docs/pictures/{name}.svg", metadata={"Date": None})


def _gains(figure: Any, title: str, cases: Sequence[tuple[str, Race]]) -> None:
    """A point with its interval for each case, the greatest gain on top."""
    from matplotlib.ticker import MultipleLocator

    figure.suptitle(title, x=0.01, ha="left")
    axes = figure.subplots()
    cases = sorted(cases, key=lambda case: float(gain(case[1])[0]))
    for at, (_, race) in enumerate(cases):
        middle, low, high = map(float, gain(race))
        axes.plot((low, high), (at, at), color=OURS, linewidth=2.2, solid_capstyle="butt")
        axes.plot(middle, at, "o", color=OURS, markersize=7)
        axes.annotate(gain(race)[0], (high, at), (6, 0), textcoords="offset points", va="center")
    axes.axvline(1, color=INK, linewidth=1.2)
    axes.set(yticks=range(len(cases)), yticklabels=[name for name, _ in cases],
             xlabel="times as fast as stock (1.00), with 95 % interval",
             ylim=(-0.7, len(cases) - 0.3))  # fmt: skip
    axes.xaxis.set_major_locator(MultipleLocator(0.05))
    axes.xaxis.set_major_formatter("{x:.2f}")
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)


def headline(results: Path) -> list[tuple[str, Race]]:
    """Steps of several micro-batches, TP 2, bf16: what README names."""
    cases = []
    for race in iterations(results):
        kind, layers, ranks, model, _, tokens, _ = race.case
        if kind == "bf16" and ranks == "TP 2" and not tokens.endswith(" x 1"):
            of = "local layers" if layers == "local" else "default layers"
            cases.append((f"{model}, {of}, {race.gpus}", race))
    return cases


def _gain(figure: Any, results: Path) -> None:
    cases = headline(results)
    percents = [100 * (float(gain(race)[0]) - 1) for _, race in cases]
    said = f"gains {min(percents):.0f} to {max(percents):.0f} %"
    _gains(figure, f"A training step of several micro-batches {said} (TP 2, bf16)", cases)


def _iterations(figure: Any, results: Path) -> None:
    cases = []
    for race in iterations(results):
        kind, layers, ranks, model, _, tokens, remark = race.case
        name = f"{race.gpus}, {ranks}, {model}, {tokens}"
        name += {"FP8": ", FP8"}.get(kind, "") + (", local" if layers == "local" else "")
        name += remark and " *"
        cases.append((name, race))
    _gains(figure, "All measured steps: tokens of a micro-batch x micro-batches", cases)
    figure.axes[0].annotate("* driver calls made by Python", (1, 0.05), ha="right",
                            xycoords="axes fraction", fontsize=9)  # fmt: skip


def _efficiency(figure: Any, results: Path) -> None:
    figure.suptitle("Communication hidden by each library: GPT-3's MLP, 4 x H200, TP 4", x=0.01,
                    ha="left")  # fmt: skip
    found = hidden_shares(results)
    for axes, call in zip(figure.subplots(1, 2, sharey=True), ("AG+GEMM", "GEMM+RS"), strict=True):
        of = [race for race in found if race.case[0] == call]
        for name, (arm, color, width) in ARMS.items():
            shares = [race.arms[arm]["efficiency"] for race in of]
            axes.plot(range(len(of)), shares, "o-", color=color, label=name, linewidth=width)
            for at, (race, share) in enumerate(zip(of, shares, strict=True)):
                lowest = share == min(race.arms[arm]["efficiency"] for arm, *_ in ARMS.values())
                axes.annotate(f"{share:.2f}", (at, share), (-7, -15 if lowest else 7),
                              textcoords="offset points", ha="center", fontsize=9,
                              color=INK)  # fmt: skip
        axes.set(xticks=range(len(of)), xticklabels=[race.case[1] for race in of], title=call,
                 xlabel="M, tokens of a micro-batch", ylim=(-0.1, 1.1),
                 xlim=(-0.4, 3.4))  # fmt: skip
    figure.axes[0].set_ylabel("E, share that is hidden")
    figure.axes[1].legend(loc="lower right", frameon=False)


CHARTS: dict[str, tuple[float, Callable[[Any, Path], None]]] = {
    "gain": (3.1, _gain), "iterations": (6.6, _iterations), "efficiency": (4, _efficiency),
}  # fmt: skip

"""What pictures of runs, rows and predictions show: nothing hidden, nothing cut off in silence."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib", reason="needs the extra `bench`")
pytest.importorskip("pydantic", reason="needs the extra `launch`")

from flux_megatron.lab.results import plot, report
from flux_megatron.lab.results.iterations import Iteration, Series
from flux_megatron.lab.train import curves
from flux_megatron.launch.experiment import load

LOSSES = [5.0, 4.0, 3.0]


def rows(losses):
    return [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]


def line(axes, name):
    (found,) = [one for one in axes.lines if one.get_label() == name]
    return found


@pytest.fixture
def saved(monkeypatch):
    """The figures that `curves` would write."""
    figures = []
    monkeypatch.setattr(curves, "_save", lambda figure, file: figures.append(figure))
    return figures


def test_equal_losses_are_both_seen(saved, tmp_path):
    compared = {"flux": rows(LOSSES), "stock": rows(LOSSES)}
    curves.draw_compared(tmp_path / "x.png", compared, 1e-5, "any step", "4 x NVIDIA H200")
    (figure,) = saved
    losses, differences = figure.axes
    ours, stock = line(losses, "flux"), line(losses, "stock")
    assert stock.get_linewidth() > 3 * ours.get_linewidth()
    assert [*losses.lines].index(ours) > [*losses.lines].index(stock)  # ours is on top
    assert figure.get_suptitle() == "4 x NVIDIA H200"
    assert [*line(differences, "|flux - stock|").get_ydata()] == [0.0, 0.0, 0.0]
    assert differences.get_ylim()[0] < 0  # a line at 0 is not on the frame
    assert set(line(differences, "tolerance of any step").get_ydata()) == {1e-5}


def test_steps_are_whole_numbers(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    made = []
    monkeypatch.setattr(curves, "_figure", lambda *_: made.append(Figure()) or (
        made[0], [made[0].add_subplot()]
    ))  # fmt: skip
    curves.draw(tmp_path / "x.png", rows(LOSSES), "a run")
    (axes,) = made[0].axes
    assert all(float(tick).is_integer() for tick in axes.get_xticks())


@pytest.mark.parametrize(
    ("name", "machine"),
    [
        ("paper/gpt3-175b_a100-pcie", "128 x A100-PCIE-80GB"),
        ("cpu/tiny", "4 ranks on a CPU, kernels interpreted"),
    ],
)
def test_results_name_the_machine_and_hide_no_arm(name, machine, tmp_path, monkeypatch):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figures = []
    monkeypatch.setattr(
        FigureCanvasAgg, "print_png", lambda canvas, file: figures.append(canvas.figure)
    )
    experiment = load(name)
    series = Series(tuple(Iteration(i, i, 0.1, 3.0) for i in range(1, 9)), (1,))
    run = report.Run(tmp_path, experiment, dict.fromkeys(experiment.arms, series))
    (found,) = report.reports([run])
    plot.draw(found, tmp_path / "x.png")
    (figure,) = figures
    assert figure.get_suptitle() == f"{name}: {machine}"
    assert found.plain()["machine"] == machine
    losses = figure.axes[1]
    widths = [one.get_linewidth() for one in losses.lines]
    assert widths == sorted(widths, reverse=True)  # thin lines on wide ones
    assert len(set(widths)) == len(experiment.arms)

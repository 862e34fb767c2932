"""The DLRM study: its collectives, its step, its file, and its tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_simulate import printed
from without_torch import without_torch

from flux_megatron.lab.perf import dlrm
from flux_megatron.lab.perf.dlrm import (
    ARMS,
    Costs,
    Job,
    Network,
    Prediction,
    all_reduce_us,
    all_to_all_us,
    serve,
)
from flux_megatron.lab.simulate import study
from flux_megatron.lab.simulate.predictions import Alternative
from flux_megatron.launch.errors import ExperimentError

ROOT = Path(__file__).parents[2]
NAME = "study/dlrm-128-nodes"


@pytest.fixture(scope="module")
def shipped() -> study.StudyFile:
    return study.load(NAME)


def test_what_the_page_says_of_the_papers_figure(shipped):
    """Both all-to-alls overlapped: as the paper; forward alone: less than half, and never near."""
    arms = study.predict(shipped.study)
    low, high = study.NEAR
    assert low < study.reduction(arms, "both") < high
    assert study.reduction(arms, "forward") < 0.21 / 2
    tried = [*study.jointly(shipped), *study.one_at_a_time(shipped)]
    assert all(study.reduction(one.steps, "forward") < low for one in tried)
    assert not any(one.refused for one in tried)


def arms_of(*milliseconds: float) -> dict[str, Prediction]:
    """Half a millisecond of each step is the lookup."""
    parts = ({"lookup": 500.0, "update": ms * 1e3 - 500} for ms in milliseconds)
    return {arm: Prediction(sum(p.values()), p) for arm, p in zip(ARMS, parts, strict=True)}


def test_printed_figures_by_hand(shipped, monkeypatch):
    monkeypatch.setattr(study, "predict", lambda of: arms_of(20, 18, 16, 10))
    other = Alternative({"model.pooling": 7}, arms_of(40, 38, 32, 10))
    monkeypatch.setattr(study, "one_at_a_time", lambda found: [other])
    tried = [other, Alternative({}, arms_of(10, 8, 7, 5))]
    monkeypatch.setattr(study, "jointly", lambda found: tried)
    paper = str(shipped.paper["reduction"])
    assert printed(study.shown(shipped, swept=True)) == [
        ["lookup", "0.5", "2.5", "0.5", "2.8", "0.5", "3.1", "0.5", "5.0"],
        ["update", "19.5", "97.5", "17.5", "97.2", "15.5", "96.9", "9.5", "95.0"],
        ["unfused", "20.0", "", ""],
        ["forward", "18.0", "10.0%", paper],
        ["both", "16.0", "20.0%", paper],
        ["ours", "10.0", "50.0%", ""],
        ["model.pooling = 7", "40.0", "5.0%", "20.0%", "75.0%"],
        ["forward", "2", "5.0% to 20.0%", "1"],
        ["both", "2", "20.0% to 30.0%", "1"],
        ["ours", "2", "50.0% to 75.0%", "0"],
    ]


@pytest.mark.parametrize("arm", ARMS)
def test_parts_are_the_step(shipped, arm):
    step = dlrm.predict(shipped.study, arm)
    assert sum(step.parts.values()) == pytest.approx(step.step_us)
    assert min(step.parts.values()) >= 0


def test_nothing_is_gained_where_nothing_travels(shipped):
    fast = replace(shipped.study.network, bandwidth_gbps=1e9, latency_us=0.0, message_us=0.0)
    step = replace(shipped.study.step, layout_copies=False, fused_slowdown=1.0, slices=10**6)
    arms = study.predict(replace(shipped.study, network=fast, step=step))
    for arm in ("forward", "both"):
        assert abs(study.reduction(arms, arm)) < 1e-4
    assert study.reduction(arms, "ours") > 0.3  # its kernel pools faster


def test_a_slow_network_is_the_whole_step(shipped):
    """Then the unfused step is at least both all-to-alls and all sums, one after the other."""
    slow = replace(shipped.study, network=replace(shipped.study.network, bandwidth_gbps=0.1))
    costs, layers = Costs(slow), slow.model.bottom_layers + slow.model.top_layers
    least = 2 * costs.exchange_us + layers * costs.sum_us(1)
    for arm in ARMS:
        assert dlrm.predict(slow, arm).step_us > 0.99 * least


def test_the_all_to_all_goes_before_sums_that_have_not_begun():
    sums = [Job(0.0, 10.0), Job(1.0, 10.0), Job(30.0, 10.0)]
    assert serve(sums, Job(5.0, 7.0)) == (17.0, 40.0)  # behind the first, before the second
    assert serve(sums, Job(25.0, 7.0)) == (32.0, 42.0)  # the network was free
    assert serve(sums, Job(99.0, 7.0)) == (106.0, 106.0)
    assert serve([], Job(5.0, 7.0)) == (12.0, 12.0)


def test_collectives():
    torus = Network((16, 8), 25.0, 0.0)
    assert all_to_all_us(torus, 1e6) == pytest.approx(4 * 1e6 / 2 / 25e3)  # 16 / 4 hops, 2 links
    assert all_to_all_us(replace(torus, shape=(32, 4)), 1e6) == pytest.approx(160.0)
    switch = Network((128,), 25.0, 1.0)
    assert all_to_all_us(switch, 128e3) == pytest.approx(1.0 + 127e3 / 25e3)
    assert all_to_all_us(replace(switch, message_us=2.0), 128e3) == pytest.approx(255.0)
    # 15 of 16 of all, then 7 of 8 of a sixteenth, there and back over two links each
    both_ways = 2 * (15 / 16 + 7 / 8 / 16) * 1e6 / 2 / 25e3
    assert all_reduce_us(torus, 1e6) == pytest.approx(both_ways)
    assert all_reduce_us(switch, 0.0) == pytest.approx(254.0)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("network.bandwidth_gbps", -1.0, "Input should be greater than 0, -1.0 given"),
        ("network.shape", [1], "[1] given, two nodes or more expected"),
        ("model.tables", 100, "100 given, at least one for each of 128 nodes"),
        ("step.global_batch", 65537, "65537 given, a multiple of 128"),
        ("network.bandwith_gbps", 1.0, "did you mean 'bandwidth_gbps'?"),
        ("cluster", {"nodes": 4}, "unknown key"),
    ],
)
def test_a_wrong_value_is_one_line(key, value, words):
    with pytest.raises(ExperimentError) as caught:
        study.load(NAME, {key: value})
    (line,) = [line for line in str(caught.value).splitlines() if words in line]
    assert line.startswith(f"{NAME}: {key}: ")


def test_every_value_has_its_source(tmp_path):
    text = (ROOT / "configs/studies/dlrm-128-nodes.yaml").read_text()
    file = tmp_path / "mine.yaml"
    file.write_text(text.replace('  step.slices: "the default of our kernel"\n', ""))
    with pytest.raises(ExperimentError, match=r"step.slices: neither stated nor assumed"):
        study.load(str(file))


def test_a_swept_value_that_cannot_be_is_said():
    tried = study.changed(study.load(NAME), {"network.shape": 4})
    assert (tried.steps, "4 given" in tried.refused) == ({}, True)


def test_the_command_needs_no_torch(tmp_path):
    file = tmp_path / "all.json"
    done = without_torch("simulate", NAME, "--sweep", "--json", file)
    for words in ("shorter by", "about 21 %", "network.bandwidth_gbps = 12.5"):
        assert words in done.stdout
    found = json.loads(file.read_text())
    unfused, both = (found["arms"][arm]["step_us"] for arm in ("unfused", "both"))
    assert found["reductions"]["both"] == pytest.approx(1 - both / unfused)
    assert len(found["alternatives"]) > 100

"""The verdict on a node: of every answer of nvidia-smi, and of none."""

from __future__ import annotations

import types
from itertools import count
from typing import get_args, get_type_hints

import pytest
import torch

from flux_megatron.launch.workload import Link
from flux_megatron.preflight import allreduce, gpus, load
from flux_megatron.preflight.__main__ import main, verdict
from flux_megatron.preflight.finding import Finding, NotChecked, output_of

SOUND = {
    "index": "0\n1\n",
    "ecc.errors.uncorrected.volatile.total": "0, 0\n1, 0\n",
    "remapped_rows.pending": "0, No\n1, No\n",
    "remapped_rows.failure": "0, No\n1, No\n",
    "clocks_throttle_reasons.hw_thermal_slowdown": "0, Not Active\n1, Not Active\n",
    "clocks_throttle_reasons.hw_power_brake_slowdown": "0, Not Active\n1, Not Active\n",
    "--status": "GPU 0: A\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\n"
    "GPU 1: A\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\n",
    "--errorcounters": "GPU 0: A\n\t Link 0: Replay Errors: 0\n\t Link 0: Recovery Errors: 0\n",
}


@pytest.fixture
def smi(monkeypatch):
    """A function that sets the answers; None: that question fails."""
    answers = dict(SOUND)

    def answer(command, timeout_s):
        question = (
            command[-1] if command[1] == "nvlink" else command[1].split("=")[1].split(",")[-1]
        )
        if answers[question] is None:
            raise NotChecked("exit code 2")
        return answers[question]

    monkeypatch.setattr(gpus, "output_of", answer)
    monkeypatch.setattr(gpus.shutil, "which", lambda name: name)
    return answers.update


def of(status: str, count: int = 2, link: str = "nvlink") -> list[str]:
    return [finding.text for finding in gpus.examine(count, link) if finding.status == status]


def test_sound_node_is_fit(smi):
    assert of("unfit") == of("not checked") == []
    assert len(of("ok")) == len(SOUND)
    assert len(of("ok", link="pcie")) == len(SOUND) - 2
    smi({"--errorcounters": "GPU 0: A\n\t Link 0: Replay Errors: 4\n"})
    assert of("note") == ["GPU 0: NVLink 0: 4 Replay errors"]
    assert of("unfit") == []


UNFIT = {
    "a GPU is missing": ("index", "0\n", "1 GPUs, 2 expected"),
    "memory": ("ecc.errors.uncorrected.volatile.total", "0, 0\n1, 7\n", "GPU 1: uncorrected ECC"),
    "a row waits": ("remapped_rows.pending", "0, Yes\n1, No\n", "GPU 0: rows of memory wait"),
    "heat": ("clocks_throttle_reasons.hw_thermal_slowdown", "0, Active\n1, Not Active\n", "heat"),
    "a link is down": (
        "--status",
        "GPU 0: A\n\t Link 0: 26.562 GB/s\nGPU 1: A\n\t Link 0: <inactive>\n",
        "GPU 1: 0 active NVLinks, others 1",
    ),
    "all links are down": ("--status", "GPU 0: A\n\t Link 0: <inactive>\n", "0 active NVLinks"),
    "a link was lost": (
        "--errorcounters", "GPU 0: A\n\t Link 3: Recovery Errors: 2\n",
        "NVLink 3: 2 Recovery errors",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNFIT)
def test_unfit_node_says_why(smi, case):
    question, answer, expected = UNFIT[case]
    smi({question: answer})
    (found,) = of("unfit")
    assert expected in found


def test_a_driver_that_does_not_count_its_gpus_makes_a_node_unfit(smi):
    smi({"index": None})
    assert [*gpus.examine(2, "nvlink")] == [Finding("unfit", "GPUs: exit code 2")]


@pytest.mark.parametrize("question", [*SOUND][1:])
def test_what_cannot_be_asked_is_not_passed(smi, question):
    smi({question: None})
    assert len(of("not checked")) == 1
    assert len(of("ok")) == len(SOUND) - 1


def test_what_has_no_answer_is_not_passed(smi, monkeypatch):
    smi({"ecc.errors.uncorrected.volatile.total": "0, [N/A]\n1, [N/A]\n"})
    assert "GPU 0, 1 has no ecc.errors" in of("not checked")[0]
    monkeypatch.setattr(gpus.shutil, "which", lambda name: None)
    assert of("not checked") == ["errors, links and clocks of GPUs: no nvidia-smi"]


LOADS = {
    "fit": ({"allreduce_gbps": 300.0, "sm_mhz": [1500, 1400]}, []),
    "a slow link": (
        {"allreduce_gbps": 99.6, "sm_mhz": [1500]},
        ["all-reduce 100 GB/s, 230 expected"],
    ),
    "a slow GPU": (
        {"allreduce_gbps": 300.0, "sm_mhz": [1500, 345]},
        ["SM clock under GEMMs: GPU 1: 345 MHz, 1200 expected"],
    ),
}


@pytest.mark.parametrize("case", LOADS)
def test_load_is_held_against_the_clusters_file(monkeypatch, case):
    reached, expected = LOADS[case]
    monkeypatch.setattr(load, "_reached", lambda gpus: reached)
    assert [f.text for f in load.examine(2, 230, 1200) if f.status == "unfit"] == expected


def test_figures_are_found_among_lines_of_nccl(monkeypatch):
    """NCCL_DEBUG=INFO writes behind them."""
    line, behind = '{"allreduce_gbps": 300.0, "sm_mhz": [1500]}', "comm 0x1 - Destroy COMPLETE"
    monkeypatch.setattr(load, "output_of", lambda command, limit_s: f"NCCL\n{line}\n{behind}\n")
    assert load._reached(2) == {"allreduce_gbps": 300.0, "sm_mhz": [1500]}
    monkeypatch.setattr(load, "output_of", lambda command, limit_s: behind)
    with pytest.raises(NotChecked, match="it printed no figures"):
        load._reached(2)


def test_load_that_fails_or_is_not_expected(monkeypatch):
    def fails(gpus: int) -> dict:
        raise NotChecked("no answer in 180 s")

    monkeypatch.setattr(load, "_reached", fails)
    assert [f.status for f in load.examine(2, 230, None)] == ["not checked", "unfit"]
    assert [f.status for f in load.examine(2, None, None)] == ["not checked", "not checked"]
    monkeypatch.setattr(load, "find_spec", lambda name: None)
    assert [f.status for f in load.examine(2, 230, 1200)] == ["not checked"]


def test_commands_are_bounded():
    assert output_of(["echo", "yes"], 30) == "yes\n"
    for command, why in (
        (["no-such"], "No such file"),
        (["false"], "exit code 1"),
        (["sleep", "9"], "no answer"),
    ):
        with pytest.raises(NotChecked, match=why):
            output_of(command, 0.2 if command[0] == "sleep" else 30)


def test_verdict_is_one_line(tmp_path, monkeypatch):
    given = ("ok", "a"), ("unfit", "b"), ("not checked", "c"), ("unfit", "d")
    findings = [Finding(*each) for each in given]
    assert verdict(findings) == "unfit: b; d; not checked: c"
    assert verdict(findings[:1]) == "fit"
    monkeypatch.setattr(gpus.shutil, "which", lambda name: None)
    for link in {*get_args(get_type_hints(Link)["kind"])} - {"memory"}:  # of ranks of the CPU
        main(["--gpus", "2", "--link", link, "--verdict", str(tmp_path / link)])
        assert (tmp_path / link).read_text().startswith("fit; not checked: errors, links")


@pytest.mark.parametrize(("least", "status"), [(230.0, "ok"), (230.1, "unfit")])
def test_bus_bandwidth_of_eight_ranks_by_hand(monkeypatch, least, status):
    """20 all-reduces of 1 MiB: 7 / 8 of 2 MiB a link in 7978 ns each are 230.01 GB/s."""
    sizes = []
    clock = count(0.0, 20 * 7978e-9)
    named = {"get_world_size": lambda: 8, "all_reduce": lambda x: sizes.append(x.nbytes)}
    monkeypatch.setattr(allreduce, "dist", types.SimpleNamespace(**named))
    monkeypatch.setattr(allreduce.time, "perf_counter", lambda: next(clock))
    gbps = allreduce._bus_gbps(torch.device("cpu"))
    assert sizes == [2**20] * 25
    assert gbps == pytest.approx(230.01, abs=0.01)
    monkeypatch.setattr(load, "_reached", lambda gpus: {"allreduce_gbps": gbps})
    (finding,) = (f for f in load.examine(8, least, None) if f.text.startswith("all-reduce"))
    assert finding.status == status


def test_all_reduce_of_two_ranks():
    """The program itself, on the CPU through gloo."""
    reached = load._reached(2)
    assert reached["allreduce_gbps"] > 0
    assert reached["sm_mhz"] is None


@pytest.mark.parametrize(("output", "mhz"), [("1755\n", 1755), ("[N/A]\n", None), (None, None)])
def test_a_rank_asks_for_the_clock_of_its_own_gpu(monkeypatch, output, mhz):
    """By its UUID: a node may have GPUs that the job does not see."""

    def answer(command, timeout_s):
        assert "--id=GPU-2" in command
        if output is None:
            raise NotChecked("no answer")
        return output

    monkeypatch.setattr(allreduce, "output_of", answer)
    assert allreduce._sm_mhz("GPU-2") == mhz

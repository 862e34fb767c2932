"""The harness itself, without a checkout: what is drawn, what counts as equal, how ranks end."""

from __future__ import annotations

import copy
import os
import time

import comparison
import drawing
import pytest
import server
import te_launches
import torch
import training_space
import trial

from flux_megatron.launch.parser_signature import check, recorded, releases

NUMBERS = range(40)


@pytest.mark.parametrize("release", releases())
def test_what_is_drawn_is_known_to_the_release(release):
    for number in NUMBERS:
        drawn = drawing.draw(release, 1, number)
        assert check([*drawn.arguments, *drawn.ours], release) == []
        assert drawn == drawing.draw(release, 1, number)


def test_combinations_keep_the_rules():
    kinds = set()
    for number in range(300):
        drawn = drawing.draw("core_v0.16.1", 7, number)
        assert drawn.ranks <= 4
        tp = _value(drawn, "--tensor-model-parallel-size")
        pp = _value(drawn, "--pipeline-model-parallel-size")
        assert drawn.ranks % (tp * pp) == 0
        assert _value(drawn, "--num-layers") % pp == 0
        if "--sequence-parallel" in drawn.arguments:
            assert _value(drawn, "--seq-length") % tp == 0
        if "--num-experts" in drawn.arguments and tp > 1:
            assert "--sequence-parallel" in drawn.arguments
        assert ("--bf16" in drawn.arguments) == (drawn.precision == "bf16")
        assert "--bf16" not in training_space.in_fp32(drawn)
        kinds |= {drawn.resume, f"te {drawn.te}", drawn.precision, drawn.ranks}
    assert kinds >= {
        None,
        "own",
        "stock",
        "ours",
        "te True",
        "te False",
        "fp32",
        "bf16",
        "fp16",
        1,
        2,
        4,
    }


def _value(drawn, option):
    return int(drawn.arguments[drawn.arguments.index(option) + 1])


def _record(**changes):
    entry = {"iteration": 1, "lm loss": 4.0, "grad_norm": 2.0, "skipped_iter": 0.0} | changes
    weight = torch.arange(4.0)
    state = {"w": weight, "optimizer 0 parameter 0 exp_avg": weight / 10}
    calls = {"total": 2, "overlapped": 2, "fallbacks": {}}
    return {"iterations": [entry], "evaluations": [], "state": state, "calls": calls}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lm loss": 4.0001}, "loss differs"),
        ({"lm loss": float("nan")}, "loss differs"),
        ({"lm loss": None}, "lm loss of stock"),
        ({"grad_norm": 2.001}, "grad norm differs"),
        ({"skipped_iter": 1.0}, "skipped_iter of stock"),
        ({"mtp loss": 1.0}, "others of ours"),
    ],
)
def test_another_iteration_is_a_difference(changes, words):
    found = comparison.compare([_record()], [_record(**changes)], None)
    assert words in found.wrong[0]


@pytest.mark.parametrize("name", ["w", "optimizer 0 parameter 0 exp_avg"])
def test_another_state_is_a_difference(name):
    ours = copy.deepcopy(_record())
    ours["state"][name][1] += 1e-3
    assert "differs" in comparison.compare([_record()], [ours], None).wrong[0]
    del ours["state"][name]
    assert "other names" in comparison.compare([_record()], [ours], None).wrong[0]


def test_half_precision_is_held_against_stock_s_own_distance():
    reference, stock = _record(), _record(**{"lm loss": 4.004})

    def wrong(loss):
        ours = _record(**{"lm loss": loss})
        return comparison.compare([stock], [ours], [reference], "bf16").wrong

    assert wrong(3.994) == []
    assert "lm loss of ours" in wrong(3.98)[0]


class FakeArms:
    """Arms whose ends are given: stock's and ours', of the first halves and the second."""

    def __init__(self, refused=False, records=None, **ends):
        self._ends, self._refused, self._records = ends, refused, records or {}
        self.started = []

    def first(self, arm):
        return self._end(f"{arm}1")

    def second(self, arm, source):
        return self._end(f"{arm}2_{source}")

    def _end(self, name):
        self.started.append(name)
        return self._ends.get(name, server.End([0]))

    def records(self, arm):
        return self._records.get(arm, [_record()])

    def refused(self):
        return self._refused

    def last_words(self, arm):
        return f"words of {arm}"


def _drawn(**changes):
    given = {"arguments": ["--sequence-parallel"], "ours": [], "stock": [], "ranks": 1}
    return drawing.Combination(**given, precision="fp32", **changes)


FAILED, HUNG = server.End([1]), server.End([0], hung=True)


@pytest.mark.parametrize(
    ("fake", "resume", "outcome"),
    [
        ({"stock1": FAILED}, None, "stock fails"),
        ({"stock1": HUNG}, None, "stock fails"),
        ({"ours1": FAILED, "refused": True}, None, "refused"),
        ({"ours1": FAILED}, None, "finding"),
        ({"ours1": HUNG, "refused": True}, None, "finding"),
        ({"ours2_stock": FAILED}, "stock", "finding"),
        ({"ours2_ours": FAILED}, "own", "finding"),
        ({"stock2_ours": FAILED}, "ours", "finding"),
        ({"stock2_ours": FAILED, "stock2_stock": FAILED}, "ours", "stock fails"),
    ],
)
def test_how_an_arm_ends_decides(fake, resume, outcome):
    with pytest.raises(trial.Verdict) as verdict:
        trial.judged(FakeArms(**fake), _drawn(resume=resume))
    assert verdict.value.outcome == outcome


@pytest.mark.parametrize("resume", [None, "own", "stock", "ours"])
def test_both_arms_are_compared(resume):
    fake = FakeArms()
    found, calls = trial.judged(fake, _drawn(resume=resume))
    assert found.wrong == []
    assert calls == (2, 2)
    assert len(fake.started) == (2 if resume is None else 4)
    other = FakeArms(records={"ours": [_record(grad_norm=3.0)]})
    assert trial.judged(other, _drawn(resume=resume))[0].wrong
    assert [name for name in other.started if name.startswith("again")] == {
        None: ["again1"], "ours": ["again1", "again2_ours"],
    }.get(resume, ["again1", "again2_again"])  # fmt: skip


def _body(run, number):
    with open(f"{run.folder}/{number}.said", "w") as stream:
        print(os.environ["RANK"], os.environ["WORLD_SIZE"], file=stream)
    os.write(1, b"a word\n")  # pytest has taken sys.stdout
    what = run.arguments[number]
    if what == "sleep":
        time.sleep(60)
    return int(what)


@pytest.mark.parametrize(
    ("what", "codes", "hung"),
    [
        (["0", "0"], [0, 0], False),
        (["3", "sleep"], [3, -9], False),
        (["0", "sleep"], [0, -9], True),
    ],
)
def test_ranks_are_forked_and_ended(what, codes, hung, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "GRACE_S", 0.2)
    monkeypatch.setattr(server, "DUMP_S", 0.0)
    monkeypatch.setattr(server.signal, "SIGUSR1", 0)  # these ranks have no handler
    limit = 1.0 if hung else 30.0
    end = server.fork_ranks(server.Run(what, 2, str(tmp_path), limit), _body)
    assert (end.codes, end.hung, end.good) == (codes, hung, codes == [0, 0])
    assert (tmp_path / "1.said").read_text() == "1 2\n"
    assert (tmp_path / "0.log").read_text() == "a word\n"


def test_megatron_knows_the_options_of_every_launch():
    known = {*recorded()["core_v0.16.1"], "--flux-overlap", "--flux-layers"}
    for case in te_launches.CASES:
        for arm in te_launches.ARMS:
            words = te_launches.arguments(case, arm)
            assert {word for word in words if word.startswith("--")} <= known

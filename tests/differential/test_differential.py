"""The harness itself, without a checkout: what is drawn, what counts as equal, how ranks end."""

from __future__ import annotations

import copy
import os
import random
import runpy
import time
from pathlib import Path
from types import SimpleNamespace

import arms
import comparison
import drawing
import fused_adam
import outcomes
import pytest
import server
import torch
import training_space
import trial

from flux_megatron.launch.parser_signature import check, releases

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


def test_in_fp32_an_option_goes_with_its_value():
    given = drawing.Combination(
        ["--fp16", "--initial-loss-scale", "1024", "--lr", "1"], [], [], 1, "fp16"
    )
    assert training_space.in_fp32(given) == ["--lr", "1"]


def test_a_hand_gives_only_what_the_parser_takes():
    parser = {"--a": "int", "--b": {"type": "str", "choices": ["x", "y"]}}
    hand = drawing.Hand(random.Random(0), parser)
    assert not hand.give("--c")
    assert not hand.give("--b", "z")
    assert hand.give("--b", "x")
    assert not hand.give("--b", "y")
    assert hand.arguments == ["--b", "x"]


def _record(**changes):
    entry = {"iteration": 1, "lm loss": 4.0, "grad_norm": 2.0, "skipped_iter": 0.0} | changes
    weight = torch.arange(4.0)
    state = {"w": weight, "optimizer 0 parameter 0 exp_avg": weight / 10}
    calls = {"total": 2, "overlapped": 2, "fallbacks": {}}
    return {"iterations": [entry], "evaluations": [], "state": state, "calls": calls}


def test_rounding_is_no_difference():
    ours = _record(**{"lm loss": 4.000004})
    ours["state"] = {name: value + 1e-6 for name, value in ours["state"].items()}
    found = comparison.compare([_record()], [ours], None)
    assert found.wrong == []
    assert found.largest["loss"] == pytest.approx(4e-6, rel=0.1)


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


def test_a_run_in_which_too_little_is_compared_fails(monkeypatch, tmp_path):
    """Of the failures of stock and of our refusals, few and a half are borne; then it ends."""
    run = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("run.py"))))

    def code(*outcomes, count=40):
        left = iter(outcomes)
        row = {"release": "a", "number": 0, "why": "", "precision": "fp32", "largest": {},
               "calls": 1, "overlapped": 1}  # fmt: skip
        one = SimpleNamespace(row=lambda _: row | {"outcome": next(left)}, close=lambda: None)
        monkeypatch.setattr(trial, "Trial", lambda *_: one)
        line = ["--megatron", str(tmp_path), "--count", str(count), "--out", str(tmp_path / "out")]
        result = run.main(run.parsed(line))
        return result, len([*left])

    quarter = ["equal", "equal", "stock fails", "equal"]
    assert code(*quarter * 13, "equal") == (0, 0)
    assert code(*quarter * 13, "finding") == (1, 0)
    assert code("stock fails", "refused", "equal", count=2) == (0, 0)
    assert code(*["stock fails"] * 100) == (1, 89)  # it does not draw for ever
    assert code(*["refused"] * 40) == (1, 29)
    with pytest.raises(SystemExit):
        run.parsed(["--megatron", "a", "b", "--count", "1", "--out", "rows"])


def test_megatron_finds_in_the_environment_what_it_demands(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    found = server.environment(tmp_path, None)
    assert found["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert found["TRITON_INTERPRET"] == "1"


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


def test_nobody_can_follow_a_stock_that_does_not_follow_itself():
    apart = {"ours": [_record(grad_norm=3.0)], "again": [_record(grad_norm=2.5)]}
    with pytest.raises(trial.Verdict, match=r"beside itself: .*grad norm differs") as verdict:
        trial.judged(FakeArms(records=apart), _drawn())
    assert verdict.value.outcome == "stock fails"
    with pytest.raises(trial.Verdict, match="beside itself"):
        trial.judged(FakeArms(records=apart, ours1=FAILED), _drawn())


def test_calls_without_a_word_are_a_finding():
    silent, none = _record(), _record()
    silent["calls"]["overlapped"] = 1
    none["calls"]["total"] = none["calls"]["overlapped"] = 0
    assert "gave a reason" in trial.uncounted([silent], _drawn())[0]
    assert "no call" in trial.uncounted([none], _drawn())[0]
    silent["calls"]["fallbacks"] = {"ag_gemm: why": 1}
    assert trial.uncounted([silent], _drawn()) == []


def test_a_refusal_is_known_by_its_words_or_its_place():
    ours = 'File "/x/flux_megatron/integration/layers.py", line 3, in f\n    raise ValueError(\n'
    assert arms.REFUSAL.search(ours + "ValueError: a frozen weight")
    assert arms.REFUSAL.search("pretrain_gpt.py: --flux-overlap cannot go with:\n  --fp8-format")
    theirs = 'File "/x/megatron/core/layers.py", line 3, in f\n    raise ValueError(\n'
    assert not arms.REFUSAL.search(theirs + "ValueError: a frozen weight")
    crash = 'File "/x/flux_megatron/ops.py", line 3, in f\n    y = x.shape\n'
    assert not arms.REFUSAL.search(crash + "AttributeError: no shape")


def test_the_table_counts_outcomes():
    row = {"release": "a", "precision": "fp32", "overlapped": 3, "calls": 4}
    rows = [row | {"outcome": each, "largest": {}} for each in ("equal", "refused", "stock fails")]
    rows[0]["largest"] = {"loss": 2e-6}
    assert outcomes.table(rows).splitlines()[2:] == [
        "| a | 2 | 1 | 1 | 0 | 9 of 12 | 2.0e-06 | 1 |",
        "| all | 2 | 1 | 1 | 0 | 9 of 12 | 2.0e-06 | 1 |",
    ]


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


def test_a_row_says_what_was_run(monkeypatch, tmp_path):
    made = trial.Trial(tmp_path / "core_v0.16.1", SimpleNamespace(seed=1, keep=None), tmp_path)
    monkeypatch.setattr(made, "_server", lambda te: None)
    monkeypatch.setattr(trial, "Arms", lambda *_: FakeArms(ours1=FAILED))
    row = made.row(5)
    assert (row["outcome"], row["why"]) == ("finding", "words of ours")
    assert row["arguments"].split() == drawing.draw("core_v0.16.1", 1, 5).arguments


@pytest.mark.parametrize(("decoupled", "theirs"), [(True, "AdamW"), (False, "Adam")])
def test_the_stand_in_for_a_fused_adam_is_torch_s(decoupled, theirs):
    starts = [torch.linspace(-1, 1, 5) for _ in range(2)]
    given = {"lr": 0.1, "weight_decay": 0.2, "betas": (0.8, 0.9), "eps": 1e-3}
    steppers = [
        fused_adam.FusedAdam([starts[0]], adam_w_mode=decoupled, **given),
        getattr(torch.optim, theirs)([starts[1]], **given),
    ]
    for step in range(4):
        for parameter, stepper in zip(starts, steppers, strict=True):
            parameter.grad = torch.cos(torch.arange(5.0) + step)
            stepper.step()
    torch.testing.assert_close(*starts)
    assert "step" in steppers[0].param_groups[0]

"""The judgement of launches with TransformerEngine, of logs that no GPU wrote."""

from __future__ import annotations

import pytest
import te_launches
import typer

from flux_megatron.launch.parser_signature import recorded


def log(losses: list[float], first: int = 1) -> tuple[int, str]:
    """As 0.16 prints it: the second loss is the mean of the first two."""
    losses = [losses[0], sum(losses[:2]) / 2, *losses[2:]]
    lines = [
        f" [2026-11-22 18:00:{i:02}] iteration {i:8}/ 20 | elapsed time per iteration (ms): 1.0 | "
        f"lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: {1 + loss:.3f} |\n"
        for i, loss in enumerate(losses, first)
    ]
    return 0, "".join(lines)


CURVE = [9.0 - i / 10 for i in range(te_launches.STEPS)]


def arms(ours: tuple[int, str]) -> dict[str, tuple[int, str]]:
    rounded = [loss + 1e-3 * (-1) ** i for i, loss in enumerate(CURVE)]
    return {"stock": log(rounded), "ours": ours, "reference": log(CURVE)}


def test_losses_that_follow_the_reference_are_equal():
    assert te_launches.judged(arms(log([loss - 1e-3 for loss in CURVE]))) == ("equal", "")


def test_losses_of_a_resumed_run_are_those_of_its_iterations():
    half = te_launches.SAVED
    processes = [log(CURVE[:half])[1], log(CURVE[half:], half + 1)[1]]
    assert te_launches.judged(arms((0, te_launches.NEXT.join(processes)))) == ("equal", "")
    read = te_launches.iterations(te_launches.NEXT.join(processes))
    assert [each["loss"] for each in read] == pytest.approx(CURVE)


@pytest.mark.parametrize(
    ("ours", "outcome", "why"),
    [
        (log([1.02 * loss for loss in CURVE]), "finding", "rank 0: grad_norm"),
        (log(CURVE[:10]), "finding", "rank 0"),
        ((1, "--flux-overlap cannot go with --x: it is not there\n"), "refused", "ours: --flux"),
        ((1, "Traceback\nValueError: 3 given\n"), "finding", "ours: ValueError: 3 given"),
    ],
)
def test_what_is_not_equal_is_named(ours, outcome, why):
    found = te_launches.judged(arms(ours))
    assert (found[0], found[1][: len(why)]) == (outcome, why)


def test_a_case_that_stock_cannot_run_tells_nothing():
    for arm in ("stock", "reference"):
        logs = arms((1, "RuntimeError: x")) if arm == "stock" else arms(log(CURVE))
        logs[arm] = (1, "RuntimeError: y")
        assert te_launches.judged(logs) == ("stock fails", f"{arm}: RuntimeError: y")


def test_megatron_knows_every_option():
    known = recorded()["core_v0.16.1"]
    for case in te_launches.CASES:
        for arm in te_launches.ARMS:
            words = [w for w in te_launches.arguments(case, arm) if w.startswith("--")]
            assert {w for w in words if w not in known} <= {"--flux-overlap", "--flux-layers"}


def test_cases_of_four_ranks_share_the_reference_of_two():
    for case, more in te_launches.OF_FOUR.items():
        asked = {arm: te_launches.arguments(case, arm) for arm in te_launches.ARMS}
        assert te_launches.ranks(case, "stock") == te_launches.ranks(case, "ours") == 4
        assert te_launches.ranks(case, "reference") == te_launches.ranks("GPT", "ours") == 2
        for arm in ("stock", "ours"):
            assert " ".join(asked[arm]).count(more) == 1
        assert not {*more.split()} & {*asked["reference"]} - {"2", "1"}


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        (["equal", "refused"], 0),
        (["equal", "finding"], 1),
        (["equal", "stock fails"], 1),
        (["refused"], 1),
        ([], 1),
    ],
)
def test_launches_that_show_nothing_fail(outcomes, code, monkeypatch, tmp_path):
    cases = [*te_launches.CASES][: len(outcomes)]
    ends = dict(zip(cases, outcomes, strict=True))
    monkeypatch.setattr("iterations.machine_of", lambda *_: {})
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setattr(
        te_launches,
        "row",
        lambda _, case, keep: {"case": case, "outcome": ends[case], "why": "", "seconds": 1},
    )
    seconds = 60 if outcomes else -1
    with pytest.raises(typer.Exit) as end:
        te_launches.main(
            tmp_path, tmp_path / "rows", cases=",".join(cases) or "GPT", seconds=seconds
        )
    assert end.value.exit_code == code

"""job.py, the machine of a job, beside a pretended Slurm: what it decides, and its signals."""

from __future__ import annotations

import ast
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from flux_megatron.launch import job

FIRST, SECOND = ARMS = ["round-1/megatron", "round-1/flux"]
# ranks that do this on the order to stop; what they got is in a file
RANKS = """
trap 'echo USR1 >>got; {usr1}' USR1
trap 'echo USR2 >>got' USR2
touch ready
while sleep 0.01; do :; done
"""


class Slurm:
    """`does`: a mode of command.sh, on all nodes; nothing if it is not there. When that of
    `stopped_in` is ready, the time limit is near. `trained`: arms and modes, in order. `asked`:
    what scontrol was to change.
    """

    def __init__(self, run: Path) -> None:
        self.run, self.state, self.excluded, self.stopped_in = run, "RUNNING", "(null)", ""
        self.does, self.trained, self.asked = dict[str, str](), list[str](), list[str]()
        self.child = job.child

    def scontrol(self, *words: str, check: bool = True, **_: object) -> str:
        if "hostnames" in words:
            return "cpu1\ncpu2\n"
        if "show" in words:
            of_job = f"JobState={self.state} ExcNodeList={self.excluded}"
            return f"Name=x {of_job if 'job' in words else 'NodeAddr=10.0.0.1'}\n"
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN  # a requeue ends what is here
        self.asked.append(" ".join(words))
        return ""

    def on_each_node(self, words: list[str]):
        bounds = words[: words.index("srun")]
        *_, option, _, script, mode = words[: words.index("bash") + 3]
        arm = str(Path(script).relative_to(self.run).parent)
        assert option == {FIRST: "--name=x-10007", SECOND: "--name=y-10007"}[arm]  # all modes
        if mode in ("start", "resume"):
            self.trained.append(f"{arm} {mode}")
            assert words[-1] == "10.0.0.1:20007"
        script = f"cd '{self.run}'\n{self.does.get(mode, '')}"
        child = self.child([*bounds, "bash", "-c", script])
        if mode == self.stopped_in:
            while not (self.run / "ready").exists():
                time.sleep(0.01)
            signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        return child

    def job(self, restarts: int = 0, **settings: object) -> job.Job:
        srun = {"megatron": ["--name=x-$SLURM_JOB_ID"], "flux": ["--name=y-$SLURM_JOB_ID"]}
        given = {
            "run": str(self.run), "arms": ARMS, "mode": "start", "progress": "latest", "srun": srun,
            "preflight_s": None, "retries": 2, "silent_s": 9,
        }  # fmt: skip
        environment = {"JOB_ID": "10007", "JOB_NODELIST": "cpu[1-2]", "RESTART_COUNT": restarts}
        environment = {f"SLURM_{name}": str(value) for name, value in environment.items()}
        return job.Job(job.Settings(**given | settings), environment)

    def ends(self, restarts: int = 0, **settings: object) -> int:
        """The exit code of a whole job."""
        try:
            self.job(restarts, **settings).train_all()
        except SystemExit as end:
            return end.code
        return 0


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """With the signals of a job blocked, as in one."""
    pretended = Slurm(tmp_path)
    for name, value in {"GRACE_S": 0.3, "scontrol": pretended.scontrol,
                        "child": pretended.on_each_node}.items():  # fmt: skip
        monkeypatch.setattr(job, name, value)
    for arm in ARMS:
        (tmp_path / arm).mkdir(parents=True)
    term = signal.getsignal(signal.SIGTERM)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, job.EVENTS)
    yield pretended
    while signal.sigtimedwait(job.EVENTS, 0):
        pass
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    signal.signal(signal.SIGTERM, term)


def test_it_runs_where_python_is_old_and_nothing_is_installed():
    tree = ast.parse(Path(job.__file__).read_text(), feature_version=(3, 6))
    modules = {one.module for one in ast.walk(tree) if isinstance(one, ast.ImportFrom)}
    imports = [one for one in ast.walk(tree) if isinstance(one, ast.Import)]
    modules |= {name.name for one in imports for name in one.names}
    assert modules <= sys.stdlib_module_names - {"__future__", "dataclasses"}  # of 3.7


def test_arms_are_trained_in_turn_and_once(slurm, capsys, monkeypatch):
    slurm.does = {"doctor": "exit 4"}
    assert slurm.ends() == 4
    assert "a node is not fit to start: see above" in capsys.readouterr().err
    slurm.does = {"doctor": "exec sleep 9"}
    with monkeypatch.context() as patch:
        patch.setattr(job, "DOCTOR_S", 1)
        assert slurm.ends() == job.TIMED_OUT
    assert "a node is not fit to start: no answer in 1 s" in capsys.readouterr().err
    assert slurm.trained == []
    slurm.does = {}
    for restarts, code in ((0, 0), (1, 0), (0, 2)):  # the last one is submitted twice
        assert slurm.ends(restarts) == code
        assert slurm.trained == [f"{arm} start" for arm in ARMS]
    assert f"{FIRST} was started before: launch it with --resume" in capsys.readouterr().err


def test_a_run_that_another_job_trains_is_left_to_it(slurm, capsys):
    (slurm.run / "job").write_text("10006\n")
    assert slurm.ends(mode="resume") == 2
    assert f"job 10006 trains {slurm.run}: cancel it to go on" in capsys.readouterr().err
    assert slurm.trained == []
    slurm.state = "COMPLETED"
    assert slurm.ends(mode="resume") == 0
    slurm.state = "RUNNING"
    assert slurm.ends(1) == 0  # the same job
    assert len(slurm.trained) == 2


def test_every_requeue_resumes_what_had_started(slurm):
    slurm.does = {"start": "exit 7", "resume": "kill -9 $$"}
    assert [slurm.ends(restarts) for restarts in (1, 2, 3)] == [7, 137, 137]
    assert slurm.trained == [f"{FIRST} {mode}" for mode in ("start", "resume", "resume")]


def test_ranks_that_fail_queue_the_job_again_within_a_bound(slurm, capsys):
    """Twice without progress; a checkpoint counts as progress, and so does an arm that is done."""
    slurm.does, requeues = {"start": "exit 7", "resume": "exit 7"}, []
    for restarts in range(1, 9):
        assert slurm.ends(restarts) == 7
        requeues.append(len(slurm.asked))
        if restarts == 3:
            assert "not queued again: 3 failures without progress" in capsys.readouterr().err
            (slurm.run / FIRST / "latest").write_text("4\n")
        if restarts == 5:
            (slurm.run / FIRST / "done").touch()
    assert requeues == [1, 2, 2, 3, 4, 5, 6, 6]
    assert {*slurm.asked} == {"requeue 10007"}
    failures = (slurm.run / FIRST / "failures").read_text().splitlines()
    assert failures[0].startswith("0 none\t")
    assert failures[-1].startswith("1 none\t")
    assert failures[-1].endswith(f" {SECOND}: ranks ended with code 7")


def test_a_cancelled_job_stays_cancelled(slurm):
    slurm.state, slurm.does = "CANCELLED", {"start": "exit 7"}
    assert slurm.ends() == 7
    assert not slurm.asked
    assert not (slurm.run / FIRST / "failures").exists()


@pytest.mark.parametrize(("before", "after"), [("(null)", "cpu2"), ("cpu[7-9]", "cpu[7-9],cpu2")])
def test_an_unfit_node_is_excluded_beside_others(slurm, before, after, capsys):
    """Although its doctor would end the job, as that of a node that lacks a GPU does."""
    slurm.excluded, verdicts = before, slurm.run / "preflight" / "10007-0"
    slurm.does["preflight"] = "exec sleep 60"
    assert slurm.ends(preflight_s=0.1) == 1
    assert "no node could be examined" in capsys.readouterr().err
    slurm.does = {"doctor": "exit 1"}
    (verdicts / "cpu1").write_text("fit; not checked: clocks\n")
    assert slurm.ends(preflight_s=1) == 1
    # of a job that waits, not of one that runs
    assert slurm.asked == ["requeue 10007", f"update JobId=10007 ExcNodeList={after}"]
    said = capsys.readouterr().out
    for line in ("node cpu1: fit; not checked: clocks", "node cpu2: unfit: no verdict, see above",
                 "unfit nodes: cpu2", f"queued again without {after}"):  # fmt: skip
        assert f" {line}\n" in said
    (verdicts / "cpu2").write_text("fit\n")
    slurm.does = {}
    assert slurm.ends(preflight_s=1) == 0


# --- signals


def test_children_get_the_signals_that_are_blocked_here(slurm):
    slurm.does["start"] = "exec grep -qE '^SigBlk:\\s0+$' /proc/self/status"
    assert slurm.ends() == 0


@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize("during", ["doctor", "start"])
def test_near_the_time_limit_ranks_save_and_the_job_queues_again(slurm, during, saves, capsys):
    """Without a checkpoint it would go round and round. No ranks start any more."""
    save = f"echo 4 >{FIRST}/latest" if saves else ":"
    slurm.does = {"doctor": f"{save}; touch ready"}
    if during == "start":
        slurm.does = {"start": RANKS.format(usr1=f"{save}; exit 3")}
    slurm.stopped_in = during
    assert slurm.ends() == ((3 if during == "start" else 0) if saves else 1)
    assert slurm.asked == ["requeue 10007"] * saves
    assert ("no checkpoint was written" in capsys.readouterr().err) is not saves
    assert slurm.trained == [f"{FIRST} start"] * (during == "start")
    assert not (slurm.run / FIRST / "failures").exists()


def test_silent_ranks_write_where_they_are_and_are_ended(slurm):
    """Each signal arrives once; an order to stop does not end the wait."""
    slurm.does["start"], slurm.stopped_in = RANKS.format(usr1=":"), "start"
    assert slurm.ends(silent_s=0.4) == 1
    assert (slurm.run / "got").read_text().split() == ["USR1", "USR2"]
    slurm.stopped_in = ""
    slurm.does["resume"] = RANKS.format(usr1=":")
    assert slurm.ends(1, silent_s=1) == 137
    slurm.does["resume"] = "exit 7"
    assert slurm.ends(2, silent_s=0.4) == 7
    first, second = (slurm.run / FIRST / "failures").read_text().splitlines()
    assert f" {FIRST}: no rank has written a line for " in first
    assert second.endswith(f" {FIRST}: ranks ended with code 7")


def test_ranks_that_write_now_and_then_are_not_silent(slurm):
    log = f"{FIRST}/logs/log"
    slurm.does["start"] = (
        f"mkdir {FIRST}/logs; for _ in 1 2 3 4 5; do echo >>{log}; sleep 0.5; done"
    )
    assert slurm.ends(silent_s=2, arms=[FIRST]) == 0

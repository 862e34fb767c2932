"""The ranks of a measurement: they end together, with one error, and with their parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flux_megatron.errors import RunFailed
from flux_megatron.tune_command import rank_processes

ROOT = Path(__file__).parents[1]
ENVIRONMENT = dict(os.environ)


def run(code: str, world_size: int = 2) -> None:
    rank_processes.run(["-c", f"import os, sys, time\n{code}"], world_size, ENVIRONMENT)


def gone(file: Path) -> bool:
    """Whether the processes whose numbers are in the file have ended."""
    return not any(Path(f"/proc/{pid}").exists() for pid in file.read_text().split())


def test_every_rank_knows_its_place(tmp_path):
    run(f"""
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "{rank_processes.STORE}")
text = " ".join(os.environ[name] for name in names)
open({str(tmp_path)!r} + "/" + os.environ["RANK"], "w").write(text)
""", 3)  # fmt: skip
    places = [(tmp_path / str(rank)).read_text().split() for rank in range(3)]
    assert [place[:4] for place in places] == [[str(r), str(r), "3", "127.0.0.1"] for r in range(3)]
    assert [len(place) for place in places] == [5, 4, 4], "rank 0 alone has the socket"


@pytest.mark.parametrize(
    ("end", "said"),
    [('sys.exit("rank 1: no memory")', "rank 1: no memory"),
     ("os.kill(os.getpid(), 9)", "rank 1 was killed by SIGKILL")],
)  # fmt: skip
def test_the_first_rank_that_fails_is_named_and_ends_the_others(tmp_path, monkeypatch, end, said):
    monkeypatch.setattr(rank_processes, "GRACE_S", 0.2)
    pids = tmp_path / "pids"
    begin = time.monotonic()
    with pytest.raises(RunFailed, match=f"^{said}$"):
        run(f"""
open({str(pids)!r}, "a").write(f"{{os.getpid()}}\\n")
if os.environ["RANK"] == "1":
    {end}
time.sleep(60)
""")  # fmt: skip
    assert time.monotonic() - begin < 30
    assert gone(pids)


def test_an_interrupt_between_popens_lock_and_its_try(monkeypatch):
    """Raised there, it leaves the lock taken, and `kill` waits for it without an end."""

    class Lock:
        taken = False

        def acquire(self, blocking=True):
            assert not self.taken, "nobody gives this lock back"
            self.taken = True
            signal.raise_signal(signal.SIGINT)
            return True

        def release(self):
            self.taken = False

        def __enter__(self):
            return self.acquire()

        def __exit__(self, *_):
            self.release()

    real = subprocess.Popen

    def with_lock(*arguments, **options):
        process = real(*arguments, **options)
        process._waitpid_lock = Lock()
        return process

    monkeypatch.setattr(rank_processes.subprocess, "Popen", with_lock)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            run("time.sleep(60)")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


PARENT = """
import faulthandler, signal, sys
from flux_megatron.tune_command import ranks
faulthandler.dump_traceback_later(50, exit=True)  # one that hangs says where
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` has them ignored
code = "import os, time; open(sys_file, 'a').write(f'{os.getpid()} '); time.sleep(60)"
code = code.replace("sys_file", repr(sys.argv[1]))
sys.exit(ranks.run(["-c", code], 2, ranks.inherited(), "go on so"))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ranks_go_with_their_parent(number, tmp_path):
    """Ctrl-C says how to go on; after a kill nothing can be said."""
    pids = tmp_path / "pids"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(pids)],
        env=ENVIRONMENT | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    end = time.monotonic() + 60
    while not (pids.exists() and len(pids.read_text().split()) == 2):
        assert time.monotonic() < end
        time.sleep(0.05)
    parent.send_signal(number)
    _, said = parent.communicate(timeout=60)
    if number == signal.SIGINT:
        assert parent.returncode == 130
        assert said.splitlines()[-1] == "stopped: go on so"
        assert "Traceback" not in said
    while not gone(pids):
        assert time.monotonic() < end
        time.sleep(0.05)

"""Jobs of `flux-megatron launch` in a Slurm of this machine: submitted, watched, written down."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
from datetime import datetime
from pathlib import Path

import torch
from slurm_cluster import SlurmCluster

ON_CPU = "cpu/tiny-pretrain_gpt"
ON_GPUS = str(Path(__file__).with_name("gpu_nodes.yaml"))
LINE = re.compile(r"\[(\S+ \S+)\] iteration +(\d+)/.*iteration \(ms\): ([\d.]+).*lm loss: (\S+)")


class Session:
    """A cluster, and the jobs that are launched in it."""

    def __init__(self, slurm: SlurmCluster, given: argparse.Namespace) -> None:
        self.slurm, self.given, self.out = slurm, given, given.out
        self.slurm_version = slurm.run("slurmctld", "-V").split()[-1]

    def submit(self, name: str, *options: str) -> Job:
        run = self.out / name
        experiment = ON_GPUS if self.given.gpus else ON_CPU
        words = ["launch", self.given.experiment or experiment, "--submit", "--run-dir", str(run)]
        words += ["--megatron-lm", str(self.given.megatron_lm.resolve())]
        done = self.slurm.call(
            sys.executable, "-m", "flux_megatron.cli", *words, *options, *self.given.options
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return Job(self, run, done.stdout.split()[-1])

    def row(self, what: str, **values: object) -> None:
        row = {
            "what": what, "slurm": self.slurm_version, "torch": torch.__version__,
            "nodes": self.slurm.count, "cpus": os.cpu_count(), "commit": self.given.commit,
            "gpus": [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())],
            **values,
        }  # fmt: skip
        print(json.dumps(row), flush=True)
        with (self.out / "rows.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


class Job:
    def __init__(self, session: Session, run: Path, number: str) -> None:
        self.session, self.slurm, self.run, self.id = session, session.slurm, run, number

    def reaches(self, *states: str, within_s: float = 300) -> str:
        """Wait until its state, or its state and restarts, is one of these."""

        def there() -> bool:
            return any(word in states for word in self._now())

        try:
            self.slurm.wait_for(there, within_s, f"{states} of job {self.id}")
        except AssertionError as error:
            raise AssertionError(f"{self._now()}: {error}\n{self.output()}") from error
        return self.slurm.outcome(self.id)

    def _now(self) -> tuple[str, str]:
        outcome = self.slurm.outcome(self.id)
        return outcome, outcome.split()[0]

    def output(self) -> str:
        return "\n".join(file.read_text() for file in sorted(self.run.glob("slurm-*.out")))

    def iterations(self) -> list[tuple[datetime, int, float, str]]:
        """When each ended, its number, its ms and its loss, in the order of the log."""
        found = [LINE.search(line) for line in self.output().splitlines()]
        return [
            (datetime.fromisoformat(one[1]), int(one[2]), float(one[3]), one[4])
            for one in found
            if one
        ]

    def trains(self, step: int, within_s: float = 300) -> None:
        """Wait for a new line of this step or a later one."""
        seen = len(self.iterations())

        def there() -> bool:
            self.slurm.outcome(self.id)
            return any(one[1] >= step for one in self.iterations()[seen:])

        self.slurm.wait_for(there, within_s, f"step {step} of job {self.id}:\n{self.output()}")

    def ranks(self, node: str) -> list[int]:
        """Processes of a node that torchrun has started."""
        found = self.slurm.processes(f"SLURMD_NODENAME={node}", f"SLURM_JOB_ID={self.id}")
        return [process for process in found if _is_rank(process)]


def _is_rank(process: int) -> bool:
    def environ(number: str) -> list[bytes]:
        return Path(f"/proc/{number}/environ").read_bytes().split(b"\0")

    with contextlib.suppress(OSError):
        parent = re.search(r"PPid:\s*(\d+)", Path(f"/proc/{process}/status").read_text())
        ours = any(word.startswith(b"LOCAL_RANK=") for word in environ(str(process)))
        theirs = any(word.startswith(b"LOCAL_RANK=") for word in environ(parent[1]))
        return ours and not theirs
    return False

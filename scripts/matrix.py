"""The matrix of versions: the fast suite in an environment of its own for each row.

    python scripts/matrix.py                      # every row, one after another
    python scripts/matrix.py --row oldest newest  # some of them
    python scripts/matrix.py --table              # docs/support.md from the rows, nothing is run

An environment needs the row's Python on PATH (pythonX.Y) or in uv, and gcc. It is made by uv where
that is installed, else by venv and pip, in a folder that is deleted after the row. Where only a
CUDA build of torch is offered, `cuda_stand_ins` takes the place of its libraries. Each row appends
a line to --out. The status is 1 if a row failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.etree import ElementTree

CHECKOUT = Path(__file__).parents[1]
SUITE = CHECKOUT / "tests" / "fast_suite.txt"
ROWS = CHECKOUT / "docs" / "results" / "cpu" / "versions.jsonl"
PAGE = CHECKOUT / "docs" / "support.md"
MARKS = ("<!-- rows of scripts/matrix.py -->", "<!-- end of rows -->")
# what the tests import; none of it asks for torch
PACKAGES = (
    "numpy", "psutil", "pydantic", "pyyaml", "rich", "typer", "jinja2", "matplotlib", "packaging",
    "hypothesis", "pytest>=8.2,<9.2", "pytest-timeout", "pytest-xdist", "setuptools",
)  # fmt: skip
OF_TORCH = ("filelock", "typing-extensions", "sympy", "networkx", "fsspec")
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
SECONDS_MAX = 3000


@dataclass(frozen=True)
class Row:
    name: str
    python: str
    torch: str
    triton: str
    megatron_core: str


# from 0.17 on megatron-core needs Python 3.12, and no torch 2.15 is built for Python 3.10
MATRIX = (
    Row("oldest", "3.10", "2.10.0", "3.6.0", "0.14.0"),
    Row("gpu machines", "3.12", "2.11.0", "3.6.0", "0.18.2"),
    Row("default", "3.11", "2.13.0", "3.7.1", "0.16.1"),
    Row("before newest", "3.12", "2.14.1", "3.8.0", "0.19.0"),
    Row("newest", "3.13", "2.15.0", "3.9.0", "0.19.2"),
    Row("newest of Python 3.10", "3.10", "2.14.1", "3.8.0", "0.16.1"),
)


class Environment:
    """A Python with the packages of a row."""

    def __init__(self, folder: Path, row: Row) -> None:
        self.python = folder / "bin" / "python"
        self.uv = shutil.which("uv")
        wanted = f"python{row.python}"
        make = [self.uv, "venv", "--python", row.python] if self.uv else [wanted, "-m", "venv"]
        run([*make, str(folder)])
        self.install("--no-deps", f"torch=={row.torch}", f"triton=={row.triton}")
        self.install("--no-deps", f"megatron-core=={row.megatron_core}")
        self.install(*PACKAGES, *OF_TORCH)
        # the core's own dependencies must be met by what is there
        self.install("--no-deps", "--editable", str(CHECKOUT))
        self.stand_in_for_cuda()

    def install(self, *arguments: str) -> None:
        pip = [str(self.python), "-m", "pip", "install", "--quiet", "--no-cache-dir"]
        by_uv = [self.uv, "pip", "install", "--quiet", "--python", str(self.python)]
        run([*(by_uv if self.uv else pip), *arguments])

    def says(self, code: str) -> str:
        return run([str(self.python), "-c", code]).strip()

    def stand_in_for_cuda(self) -> None:
        """The runtime is small and is asked whether there is a GPU: it is the real one."""
        requires = self.says("from importlib import metadata as m; print(m.requires('torch'))")
        toolkit = re.search(r"cuda-toolkit\[[^]]*\](==[\d.]+)", requires)
        small = re.findall(r"nvidia-cuda-(?:runtime|cupti)-cu\d+==[\d.]+", requires)
        if toolkit:
            small = [f"cuda-toolkit[cudart,cupti]{toolkit[1]}"]
        if small:
            self.install(*small)
            site = self.says("import sysconfig; print(sysconfig.get_path('purelib'))")
            run([str(self.python), str(CHECKOUT / "scripts" / "cuda_stand_ins.py"), site])


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return done.stdout


UNMET = """
from importlib import metadata
from packaging.requirements import Requirement
for name in ("flux-megatron", "torch"):
    for text in metadata.requires(name):
        one = Requirement(text)
        applies = one.marker is None or one.marker.evaluate({"extra": ""})
        if applies and one.name in ("torch", "triton"):
            version = metadata.version(one.name)
            if not one.specifier.contains(version, prereleases=True):
                print(f"{name} wants {one}, {version} is there")
"""


def tried(row: Row, folder: Path) -> dict:
    """What the row's environment makes of the fast suite."""
    environment = Environment(folder / "environment", row)
    report = folder / "report.xml"
    files = SUITE.read_text().split()
    command = [str(environment.python), "-m", "pytest", "-q", "--tb=short", "-rfE",
               "-p", "no:cacheprovider", f"--junitxml={report}", *files]  # fmt: skip
    # the bound of waits is one of the machine, which may be busy, not of a version
    settings = {"PYTHONDONTWRITEBYTECODE": "1", "FLUX_MEGATRON_TIMEOUT_S": "120"}
    start = time.monotonic()
    done = subprocess.run(
        command, cwd=CHECKOUT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        timeout=SECONDS_MAX, env={**os.environ, **settings},
    )  # fmt: skip
    if done.returncode:
        print(done.stdout[-6000:], file=sys.stderr)
    return {
        "seconds": round(time.monotonic() - start),
        "unmet": environment.says(UNMET).splitlines(),
        **read_report(report),
    }


def read_report(report: Path) -> dict:
    """Counts of tests, and what became of the kernels that were compiled."""
    if not report.is_file():
        lacking = {"portable": dict.fromkeys(ARCHITECTURES, "failed"), "hopper": "failed"}
        return {"passed": 0, "failed": ["no test was run"], "skipped": 0, **lacking}
    cases = list(ElementTree.parse(report).iter("testcase"))
    outcomes = {f"{c.get('classname')}::{c.get('name')}": [e.tag for e in c] for c in cases}
    failed = [name for name, tags in outcomes.items() if {"failure", "error"} & {*tags}]
    skipped = [name for name, tags in outcomes.items() if "skipped" in tags]

    def outcome(test: str) -> str:
        (name,) = [n for n in outcomes if n.endswith(f"test_sample_ptx::{test}")] or [""]
        return "failed" if name in failed else "skipped" if name in skipped else "passed"

    portable = "test_portable_kernels_keep_their_order"
    return {
        "passed": len(cases) - len(failed) - len(skipped),
        "failed": failed,
        "skipped": len(skipped),
        "portable": {a: outcome(f"{portable}[{a}]") for a in ARCHITECTURES},
        "hopper": outcome("test_hopper_kernels_keep_their_order"),
    }


def measured(row: Row) -> dict:
    commit = run(["git", "-C", str(CHECKOUT), "describe", "--always", "--dirty", "--abbrev=12"])
    made = {**asdict(row), "date": time.strftime("%Y-%m-%d"), "commit": commit.strip()}
    with tempfile.TemporaryDirectory(prefix="flux-matrix-") as folder:
        try:
            return {**made, **tried(row, Path(folder))}
        except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
            return {**made, "error": str(error)}


def table(rows: list[dict]) -> str:
    """The last row of each name, in the order of the matrix."""
    last = {row["name"]: row for row in rows}
    lines = [
        "| row | Python | torch | Triton | megatron-core | fast suite | do not compile |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in [row.name for row in MATRIX if row.name in last]:
        row = last[name]
        versions = " | ".join(row[key] for key in ("python", "torch", "triton", "megatron_core"))
        if "error" in row:
            lines.append(f"| {name} | {versions} | not made: {row['error'][:80]} | |")
            continue
        wrong = row["failed"] + row["unmet"]
        tests = f"{row['passed']} passed, {row['skipped']} skipped" + (
            f", {len(wrong)} failed" if wrong else ""
        )
        kernels = {"Hopper kernels": row["hopper"], **row["portable"]}
        uncompiled = [kernel for kernel, outcome in kernels.items() if outcome != "passed"]
        lines.append(f"| {name} | {versions} | {tests} | {', '.join(uncompiled) or '-'} |")
    return "\n".join(lines)


def write_page(out: Path) -> None:
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    behind = rest.partition(MARKS[1])[2]
    PAGE.write_text(f"{before}{MARKS[0]}\n{table(rows)}\n{MARKS[1]}{behind}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [row.name for row in MATRIX]
    parser.add_argument("--row", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--out", type=Path, default=ROWS)
    parser.add_argument("--table", action="store_true", help="write the page from the rows alone")
    given = parser.parse_args()
    if given.table:
        write_page(given.out)
        return 0
    failed = 0
    for row in (row for row in MATRIX if row.name in given.row):
        print(f"== {row}", flush=True)
        done = measured(row)
        with given.out.open("a") as file:
            file.write(json.dumps(done) + "\n")
        wrong = done.get("error") or done["failed"] or done["unmet"]
        failed += bool(wrong)
        print(f"{'failed: ' if wrong else 'passed '}{wrong or done['passed']}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

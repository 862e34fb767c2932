"""`flux-megatron doctor`: what this machine has of that which a training run needs.

Every probe is guarded: where one fails, the others still speak. It works without torch, and says
that it is missing.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from flux_megatron import option_values
from flux_megatron.command_errors import Parser
from flux_megatron.doctor import calls, machine, packages
from flux_megatron.doctor.finding import Finding, Status, Wanted, gpus_seen
from flux_megatron.errors import BadInput
from flux_megatron.versions import megatron_core

COLOURS = {"ok": 32, "note": 33, "missing": 31}  # of a terminal: green, yellow, red
PACKAGES = ("transformer_engine", "apex")


def parser() -> Parser:
    """Python's own: this command runs where only the core is installed."""
    parser = Parser(
        prog="flux-megatron doctor", allow_abbrev=False,
        description="Say what this machine has of what a training run needs; "
        "fails if none could start.",
    )  # fmt: skip
    add = parser.add_argument
    add("--gpus", type=_count, help="GPUs that this node must have; 0: it runs on the CPU")
    add(
        "--megatron-lm", type=Path, metavar="DIR",
        help="The checkout that is to run; default: the current folder, if it is one",
    )  # fmt: skip
    add("--need", action="append", default=[], choices=PACKAGES, help="Must be there")
    add("--quiet", action="store_true", help="Only what is missing")
    add("--json", type=_json, metavar="PATH", help="Write what is found there; - for stdout")
    add(
        "--strategies", type=_ranks, nargs="?", const=0, metavar="RANKS",
        help="Instead: which strategies can run which operations; default: as many ranks as GPUs",
    )  # fmt: skip
    return parser


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} given, a number of GPUs from 0 on expected")
    return int(text)


def _ranks(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} given, a number of ranks from 1 on expected")
    return int(text)


def _json(text: str) -> Path:
    path = Path(text)
    try:
        option_values.json_target(path)
    except BadInput as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return path


def main(arguments: Sequence[str] | None = None, here: Path | None = None) -> int:
    """The command; its exit status. `here`: what is looked at where no checkout is named and this
    is one.
    """
    given = parser().parse_args(arguments)
    if given.strategies is not None:
        from flux_megatron.doctor import strategies

        print(strategies.text(given.strategies or max(2, gpus_seen())))
        return 0
    checkout = given.megatron_lm
    if checkout is None and here is not None and megatron_core.version_in(here):
        checkout = here.resolve()
    findings = []
    for finding in examine(Wanted(given.gpus, checkout, tuple(given.need))):
        findings.append(finding)
        if given.json != option_values.STDOUT and (finding.status == "missing" or not given.quiet):
            print(_line(finding), flush=True)
    missing = [finding for finding in findings if finding.status == "missing"]
    if given.json is not None:
        shown = missing if given.quiet else findings
        option_values.write_json(given.json, [dataclasses.asdict(finding) for finding in shown])
    return 1 if missing else 0


def examine(wanted: Wanted) -> Iterator[Finding]:
    """The findings of all probes, in the order in which one would repair. One that fails leaves
    open whether a run can start, which is too little of what was demanded.
    """
    demanded = {"gpus": wanted.gpus, "megatron": wanted.checkout}
    for probe in PROBES:
        try:
            yield from probe(wanted)
        except Exception as error:  # noqa: PERF203, the other probes are to speak
            subject = probe.__name__.replace("_", " ")
            status: Status = "missing" if demanded.get(subject) else "note"
            yield Finding(subject, status, f"not examined: {error!r}")


def check_script(script: Path) -> None:
    """`BadInput` for what Megatron would compile at the start of a run and cannot."""
    for finding in packages.data_set_helper(Wanted(checkout=script.resolve().parent)):
        if finding.status == "missing":
            raise BadInput(f"{finding.subject}: {finding.text}; {finding.remedy}")


def _line(finding: Finding) -> str:
    status = f"{finding.status:8}"
    if sys.stdout.isatty():
        status = f"\033[{COLOURS[finding.status]}m{status}\033[0m"
    remedy = f"; {finding.remedy}" if finding.remedy else ""
    return f"{status}{finding.subject:22}{finding.text}{remedy}"


PROBES: tuple[Callable[[Wanted], Any], ...] = (
    packages.python, packages.torch, packages.triton, machine.gpus, machine.shared_memory,
    packages.megatron, packages.megatron_imports, packages.data_set_helper, machine.variables,
    packages.other_packages, packages.frameworks, machine.connections, calls.kernels,
    calls.driver_calls, calls.plans,
)  # fmt: skip

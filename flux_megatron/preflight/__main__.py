"""One node before a run: `python -m flux_megatron.preflight --gpus 8 --link nvlink --verdict FILE`.

FILE gets one line, "fit" or "unfit: ..." with the reasons, and what could not be examined. The exit
code is 0 for both, so that one node's verdict does not end the others'.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from flux_megatron.preflight import gpus, load
from flux_megatron.preflight.finding import Finding


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m flux_megatron.preflight", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--gpus", type=int, required=True, help="that this node must have")
    parser.add_argument("--link", choices=("nvlink", "pcie", "host"), required=True)
    parser.add_argument("--allreduce-gbps", type=float, help="least bus bandwidth over all GPUs")
    parser.add_argument("--sm-mhz", type=int, help="least SM clock under GEMMs")
    parser.add_argument("--verdict", type=Path, required=True, metavar="FILE")
    given = parser.parse_args(argv)
    findings = [*gpus.examine(given.gpus, given.link)]
    findings += load.examine(given.gpus, given.allreduce_gbps, given.sm_mhz)
    for finding in findings:
        if finding.status != "ok":
            print(f"{finding.status:12}{finding.text}", flush=True)
    partial = given.verdict.with_name(f".{given.verdict.name}.partial")
    partial.write_text(verdict(findings) + "\n")
    os.replace(partial, given.verdict)


def verdict(findings: Sequence[Finding]) -> str:
    """One line; what was not examined is named for a fit node too."""
    unfit, unknown = (
        "; ".join(f.text for f in findings if f.status == status)
        for status in ("unfit", "not checked")
    )
    line = f"unfit: {unfit}" if unfit else "fit"
    return f"{line}; not checked: {unknown}" if unknown else line


if __name__ == "__main__":
    main()

"""Launches of Megatron-LM with real TransformerEngine: do its specification with our linears and
its own train the same model?

    python tests/differential/te_launches.py path/to/core_v0.16.1 te_launches.jsonl
    python tests/differential/te_launches.py path/to/core_v0.16.1 te_launches.jsonl --fp8
    python tests/differential/te_launches.py path/to/core_v0.16.1 te_launches.jsonl --fp8 \
        --cases "Llama tensorwise" --steps 200

TP 2 with sequence parallelism, bf16, 20 iterations on mock data, of the cases of `te_cases`:
stock, ours, and stock in fp32, which is the reference. `comparison` says what counts as equal. A
resumed case goes on in the one arm from what the other has saved after ten iterations.
Cases of `OF_FOUR` take four ranks, but for their reference, and are left out where GPUs are fewer.
`--fp8`: the cases of `IN_FP8`, whose reference is stock in FP8 once more, with the sums of its
attention in another order: fp32 is farther from both than they are from each other.

A row a case: its outcome, losses and gradient norms of all arms, and what ours says about its
layers and calls. Exits 1 if a case is neither equal nor refused by name.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import typer
from te_cases import ARMS, CASES, IN_FP8, SAVED, SAVED_BY, STEPS, TP, arguments, ranks

HEAD = re.compile(r"\] iteration +(\d+)/ *\d+ \|(.*)")
FIELDS = {"loss": "lm loss", "grad_norm": "grad norm"}
NEXT = "\f"
REFUSED = "--flux-overlap cannot go with"


def iterations(log: str) -> list[dict[str, float]]:
    """What Megatron printed of each, in their order; `NEXT` is between two processes."""
    found = []
    for process in log.split(NEXT):
        here = []
        for number, rest in HEAD.findall(process):
            fields = dict(part.strip().partition(": ")[::2] for part in rest.split("|"))
            values = {
                name: float(fields[field]) for name, field in FIELDS.items() if field in fields
            }
            here.append({"iteration": float(number), **values})
        if len(here) > 1:  # from 0.16 on this loss is the mean of the first two
            here[1]["loss"] = round(2 * here[1]["loss"] - here[0]["loss"], 6)
        found += here
    return found


def launch(
    checkout: Path, case: str, arm: str, more: Sequence[str] = (), steps: int = STEPS,
    limit_s: float = 180,
) -> tuple[int, str]:  # fmt: skip
    """The exit status, and what all ranks printed."""
    bootstrap = ["-m", "flux_megatron.launch"] if arm == "ours" else []
    run = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks(case, arm)}"]
    command = [sys.executable, *run, *bootstrap, "pretrain_gpt.py", *arguments(case, arm, steps)]
    with tempfile.TemporaryFile("w+") as file, tempfile.TemporaryDirectory() as cache:
        process = subprocess.Popen(
            [*command, *more, "--data-cache-path", cache], cwd=checkout, stdout=file,
            stderr=subprocess.STDOUT, env={**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        )  # fmt: skip
        try:
            code = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(timeout=30)
            code = -1
        file.seek(0)
        return code, file.read()


def logs(checkout: Path, case: str, steps: int = STEPS) -> dict[str, tuple[int, str]]:
    """Of each arm. A resumed case: one arm saves, the other goes on; beside it stock from its own
    first iteration.
    """
    if case not in SAVED_BY:
        return {arm: launch(checkout, case, arm, steps=steps) for arm in ARMS}
    saver = SAVED_BY[case]
    other = "ours" if saver == "stock" else "stock"
    with tempfile.TemporaryDirectory() as folder:
        save = ["--ckpt-format", "torch_dist", "--save", folder, "--save-interval", str(SAVED)]
        saved = launch(checkout, case, saver, save, SAVED)
        # the schedule has more iterations now than when it was saved
        load = [*save[:2], "--load", folder, "--override-opt_param-scheduler"]
        gone_on = launch(checkout, case, other, load)
    joined = (saved[0] or gone_on[0], saved[1] + NEXT + gone_on[1])
    whole = {arm: launch(checkout, case, arm) for arm in ("stock", "reference")}
    return {"stock": whole["stock"], "ours": joined, "reference": whole["reference"]}


def judged(found: Mapping[str, tuple[int, str]], steps: int = STEPS) -> tuple[str, str]:
    """The outcome, and why."""
    from comparison import compare

    for arm in ("stock", "ours", "reference"):
        code, log = found[arm]
        if code:
            ours = "refused" if REFUSED in log else "finding"
            return (ours if arm == "ours" else "stock fails"), f"{arm}: {_last_error(log)}"
    stock, ours, reference = (
        [{"iterations": iterations(found[arm][1]), "evaluations": [], "state": {}}]
        for arm in ("stock", "ours", "reference")
    )
    if len(stock[0]["iterations"]) != steps:
        return "finding", f"{len(stock[0]['iterations'])} iterations in stock's log"
    wrong = compare(stock, ours, reference, "bf16").wrong
    return ("finding" if wrong else "equal"), "; ".join(wrong[:3])


def _last_error(log: str) -> str:
    if REFUSED in log:
        return log[log.index(REFUSED) :][:400].strip()
    errors = [line for line in log.splitlines() if re.search(r"\w*Error\b.*:", line)]
    return (errors or log.splitlines()[-1:] or ["nothing was printed"])[-1].strip()[-400:]


def row(checkout: Path, case: str, keep: Path | None = None, steps: int = STEPS) -> dict[str, Any]:
    start = time.monotonic()
    found = logs(checkout, case, steps)
    outcome, why = judged(found, steps)
    if keep and outcome in ("finding", "stock fails"):
        for arm, (_, text) in found.items():
            (keep / f"{re.sub(r'[ /]+', '_', case)}-{arm}.log").write_text(text)
    said = [line for line in found["ours"][1].splitlines() if "flux_megatron:" in line]
    return {
        "table": "te_launches", "case": case, "outcome": outcome, "why": why,
        "said": list(dict.fromkeys(line[line.index("flux_megatron:"):] for line in said)),
        "arms": {arm: iterations(text) for arm, (_, text) in found.items()},
        "arguments": arguments(case, "ours", steps), "seconds": round(time.monotonic() - start),
    }  # fmt: skip


def main(
    checkout: Path, out: Path, commit: str = "unknown", cases: str = "", fp8: bool = False,
    at_once: int = 4, seconds: float = 3600, keep: Path | None = None, steps: int = STEPS,
) -> None:  # fmt: skip
    """`cases`, by default all; `at_once` of them share the GPUs; none begins
    after `seconds`. Exits 1 on a finding, where stock fails, and where no case ran.
    """
    import torch

    from flux_megatron.lab.measure.iterations import machine_of

    wanted = cases.split(",") if cases else [*(IN_FP8 if fp8 else CASES)]
    if too_many := [case for case in wanted if ranks(case, "ours") > torch.cuda.device_count()]:
        print(f"left out, for want of {2 * TP} GPUs: {', '.join(too_many)}")
    about, end, ends = machine_of(checkout, commit), time.monotonic() + seconds, []
    with ThreadPoolExecutor(at_once) as pool:

        def made(case: str) -> dict[str, Any] | None:
            if time.monotonic() > end:
                return None
            return row(checkout, case, keep, steps) | about

        running = [pool.submit(made, case) for case in wanted if case not in too_many]
        for one in as_completed(running):  # a row is there as soon as its case has ended
            if (each := one.result()) is None:
                continue
            with out.open("a") as file:
                file.write(json.dumps(each) + "\n")
            ends.append(each["outcome"])
            print(each["case"], "|", each["outcome"], "|", each["why"], each["seconds"], flush=True)
    raise typer.Exit("equal" not in ends or not {*ends} <= {"equal", "refused"})


if __name__ == "__main__":
    typer.run(main)

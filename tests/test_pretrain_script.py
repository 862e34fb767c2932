"""`scripts/pretrain.sh` fails where it compares less than it says, with a Python that pretends."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "pretrain.sh"
CALLS = "flux_megatron: 4 of 4 calls overlapped"
# what the ranks print: STOCK and OURS are losses of iterations
PYTHON = """#!/usr/bin/env bash
case "$*" in
"-c "*) echo .so; exit ;;
*" --flux-overlap"*) losses=$OURS; echo "$SAID" ;;
*) losses=$STOCK ;;
esac
for loss in $losses; do
    echo " [now] iteration $((++i))/ 3 | lm loss: $loss | grad norm: 1 |"
done
"""


def pretrained(folder: Path, ours: str, said: str = CALLS, models: str = "gpt"):
    python = folder / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    given = {"PYTHON": str(python), "FLUX_MEGATRON_LM": str(folder), "MODELS": models, "RANKS": "2",
             "STOCK": "4.0 3.0 2.0", "OURS": ours, "SAID": said}  # fmt: skip
    run = subprocess.run(
        ["bash", str(SCRIPT)], env=os.environ | given, capture_output=True, text=True, timeout=60
    )
    return run.returncode, run.stdout + run.stderr


@pytest.mark.parametrize(
    ("given", "code", "word"),
    [
        ({"ours": "4.0 3.0 2.0"}, 0, "4 of 4 calls"),
        ({"ours": "4.0 3.0 2.1"}, 1, "DIFFERENT"),
        ({"ours": "4.0 3.0"}, 1, "DIFFERENT"),
        ({"ours": ""}, 1, "DIFFERENT"),
        ({"ours": "4.0 3.0 nan"}, 1, "DIFFERENT"),
        ({"ours": "4.0 3.0 2.0", "said": ""}, 1, "NOTHING OVERLAPPED"),
        ({"ours": "4.0 3.0 2.0", "models": "gpt lama"}, 2, "MODELS has lama"),
    ],
    ids=["same", "other losses", "fewer", "none", "nan", "no calls", "no such model"],
)
def test_it_passes_only_with_all_losses_and_calls(given, code, word, tmp_path):
    status, output = pretrained(tmp_path, **given)
    assert status == code, output
    assert word in output

"""The kinds of launches of docs/recipes.md that a CPU can run, each with its own arguments in small
widths.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from started import python

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import recipe_page

CHECKOUT = os.environ.get("FLUX_MEGATRON_LM")
SIZES = """
    pretrain_gpt.py --flux-overlap --flux-strict --flux-strategy pipelined
    --no-gradient-accumulation-fusion
    --num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 16
    --max-position-embeddings 16 --position-embedding-type rope --micro-batch-size 2
    --global-batch-size 4 --train-iters 2 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer
    --vocab-size 127 --split 90,10,0 --num-workers 0 --eval-iters 0 --eval-interval 9
    --log-interval 1 --no-masked-softmax-fusion --no-rope-fusion
"""
KINDS = sorted({recipe_page.kind(row) for row in recipe_page.ROWS} - {()})


def few_groups(options: list[str]) -> list[str]:
    return ["--num-query-groups", "2"] * ("--group-query-attention" in options)


@pytest.mark.slow
@pytest.mark.skipif(not CHECKOUT, reason="FLUX_MEGATRON_LM names no checkout of Megatron-LM")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: " ".join(kind).replace("--", ""))
def test_recipe_runs_with_every_call_overlapped(kind, tmp_path):
    options = " ".join(kind).split()
    launch = ["-m", "flux_megatron.cli", "run", "--device", "cpu", "--nproc-per-node", "2"]
    done = python(
        *launch, *SIZES.split(), *options, *few_groups(options), "--data-cache-path", tmp_path,
        folder=CHECKOUT, limit_s=300,
    )  # fmt: skip
    calls = re.search(r"flux_megatron: (\d+) of (\d+) calls overlapped", done.stdout + done.stderr)
    assert calls is not None, done.stdout[-3000:]
    assert calls[1] == calls[2] != "0"

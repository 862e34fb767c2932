"""The example of docs/pytorch.md, run as the page says: it trains as the unsharded model."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks

PAGE = Path(__file__).parents[1] / "docs" / "pytorch.md"
IMPORTS = "from flux_megatron.nn import ColumnParallelLinear, RowParallelLinear, sum_gradient\n"
UNSHARDED = """
ColumnParallelLinear = RowParallelLinear = torch.nn.Linear
sum_gradient = lambda parameter: parameter
"""
LIMIT_S = 200


def example() -> str:
    """The first block of Python of the page."""
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found, f"{PAGE} has no block of Python"
    return found[1]


def by_torchrun(folder: Path) -> str:
    """What the script prints when it is started as the page says."""
    script = folder / "train.py"
    script.write_text(example())
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=LIMIT_S,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def by_forks(folder: Path) -> str:
    """The same in processes that have imported everything."""
    return run_ranks(as_a_script, 2)[0]


def as_a_script(rank: int) -> str:
    dist.barrier()  # another rank may still be connecting
    dist.destroy_process_group()  # the script joins its own, by the variables that torchrun sets
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example(), "train.py", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


def unsharded_losses(steps: int) -> list[float]:
    """The same block of `torch.nn.Linear`, from the same seed, in one process."""
    names = {"__name__": "unsharded"}
    assert IMPORTS in example()
    exec(example().replace(IMPORTS, UNSHARDED), names)
    torch.manual_seed(0)
    model = names["Block"](torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(names["TOKENS"], names["HIDDEN"])
    losses = []
    for _ in range(steps):
        loss = F.mse_loss(model(x), x.flip(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("run", [by_forks, pytest.param(by_torchrun, marks=pytest.mark.slow)])
def test_the_example_trains_as_the_unsharded_model(run, tmp_path):
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", run(tmp_path))]
    assert losses == pytest.approx(unsharded_losses(10), abs=2e-6)  # it prints six digits
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.5 * losses[0]

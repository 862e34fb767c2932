"""The example of docs/plain_pytorch.md, run as the page says: it trains as the unsharded model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

PAGE = Path(__file__).parents[1] / "docs" / "plain_pytorch.md"
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


def losses_of_the_example(folder: Path, ranks: int) -> list[float]:
    script = folder / "train.py"
    script.write_text(example())
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [sys.executable, *command, str(script)], capture_output=True, text=True, timeout=LIMIT_S,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r"loss (\S+)", done.stdout)]


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


def test_the_example_trains_as_the_unsharded_model(tmp_path):
    losses = losses_of_the_example(tmp_path, 2)
    assert losses == pytest.approx(unsharded_losses(10), abs=2e-6)  # it prints six digits
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]


def test_another_training_would_be_noticed():
    """The tolerance is small beside what a step changes."""
    losses = unsharded_losses(2)
    assert abs(losses[1] - losses[0]) > 1e-3


def test_the_example_has_forty_lines():
    code = [line for line in example().splitlines() if line.strip()]
    assert len(code) <= 42

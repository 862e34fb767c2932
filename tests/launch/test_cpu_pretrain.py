"""A script of Megatron-LM on CPU tensors, with a CUDA build of torch too."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("megatron")


def test_nothing_is_pinned():
    """A CUDA build of torch without a driver: it would pin memory for a GPU, and fail."""
    program = """
        import torch

        def pin(*_, **__):
            raise RuntimeError("Found no NVIDIA driver on your system")

        torch.Tensor.pin_memory = pin
        torch.accelerator.is_available = lambda: torch.cuda.is_available()
        from flux_megatron.train.cpu_pretrain import pretend_gpu

        pretend_gpu()
        batches = torch.utils.data.DataLoader([1, 2, 3], batch_size=3, pin_memory=True)
        assert next(iter(batches)).tolist() == [1, 2, 3]
        assert torch.empty(2, pin_memory=True, device="cuda").shape == (2,)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr

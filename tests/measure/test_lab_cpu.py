"""What answers for a GPU on the CPU, as workers of a framework ask it."""

from __future__ import annotations

from unittest import mock

import pytest
import torch.distributed as dist
from started import python

from flux_megatron.lab import cpu

PRETENDED = (
    "import threading, torch; from flux_megatron.lab.cpu import pretend_cuda; pretend_cuda();"
)
ASKED = {
    "in a thread that begins later": """
made = []
thread = threading.Thread(target=lambda: made.append(torch.ones(2, device="cuda")))
thread.start()
thread.join()
assert made[0].tolist() == [1, 1]
""",
    "a copy on the host outlives the memory": """
there = torch.ones(4)
kept = [there.cpu(), there.to("cpu"), there.to(device="cpu"), there.to("cpu", torch.float64)]
there.untyped_storage().resize_(0)
assert [one.sum().item() for one in kept] == [4.0] * 4
assert kept[-1].dtype == torch.float64
""",
}


@pytest.mark.parametrize("case", ASKED)
def test_it_answers(case):
    python("-c", PRETENDED + ASKED[case])


@pytest.mark.parametrize(
    ("asked", "given"),
    [("nccl", "gloo"), ("cpu:gloo,cuda:nccl", "gloo"), ("gloo", "gloo"), (None, None)],
)
def test_groups_of_nccl_are_gloos(asked, given):
    with mock.patch.object(dist, "init_process_group") as original:
        cpu._gloo_for_nccl()
        dist.init_process_group(asked, rank=0)
    original.assert_called_once_with(given, rank=0)

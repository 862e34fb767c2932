"""Mailboxes on virtual ranks: no kernel and no copy of a rank reaches another's memory but them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from interpreted_access import needs_interpreter
from mutants import BLOCKS, SIX
from protocol_cases import Case
from virtual_ranks import STANDARD

pytestmark = needs_interpreter

HOPPER = {"rows": (16, 32, 32), "N": 16}
GRAPH = {"rows": (16,) * 6, "N": 16, "captured": True}
CASES = [
    Case("ag", "pipelined", comm_rows=5, bias=True),
    Case("ag", "pipelined", 3, parts=1, **BLOCKS),
    Case("ag", "pipelined", 3, parts=2, **BLOCKS),
    Case("ag", "pipelined", **SIX),
    Case("ag", "fused", 3, rows=(7, 20, 33), comm_rows=5, dtype=torch.bfloat16),
    Case("ag", "fused", **SIX),
    Case("rs", "pipelined", 3, rows=(7, 20, 33), comm_rows=5),
    Case("rs", "pipelined", parts=1, **BLOCKS),
    Case("rs", "pipelined", **SIX),
    Case("ar", "pipelined", rows=(7, 20, 20), comm_rows=5, layout="nn"),
    Case("backward", "pipelined", 3, layout="nn"),
    Case("backward", "pipelined", rows=(9,) * 4, last_epoch=2**32 - 2),
    Case("ag", "hopper", 3, comm_rows=5, **HOPPER),
    Case("ag", "hopper", 3, rows=(17, 31, 40), K=56, N=40, layout="nn", parts=2, block_n=32),
    Case("rs", "hopper", 3, comm_rows=5, **HOPPER),
    Case("rs", "hopper", 4, K=8, rows=(20, 20), N=16, ctas=1, layout="nn"),
    Case("ar", "hopper", 3, comm_rows=5, **HOPPER),
    Case("ar", "hopper", 3, rows=(33, 48), N=80, comm_rows=8, transport="engines", ctas=2),
    Case("ar", "hopper", transport="engines", **GRAPH),
    Case("backward", "hopper", rows=(32, 32, 48), layout="nn"),
    *(Case(host, "hopper", **GRAPH) for host in ("ag", "rs", "ar", "backward")),
    *(Case(host, "hopper", two_streams=True, **HOPPER) for host in ("ag", "rs")),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_schedule(package, case):
    for schedule in STANDARD:
        replace(case, mailboxes=True).run(package, schedule)

"""Hopper kernels and their launchers, those of experts too, on virtual ranks.

Every CTA has a strand for each of its warp partitions and for TMA (`emulated_gluon.py`). A CTA that
gets no SM is one that starts when another has ended: calls must end with one resident CTA a rank.
"""

from __future__ import annotations

import pytest
import torch
from expert_cases import ExpertCase
from interpreted_access import needs_interpreter
from mutants import CASES as CASES_OF_MUTANTS
from protocol_cases import Case
from virtual_ranks import STANDARD, Schedule

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

pytestmark = needs_interpreter
SIX = (16,) * 6
AG, RS = ("ag", "hopper"), ("rs", "hopper")
CASES = [  # beside those of mutants
    Case(*AG, rows=(32, 16, 48), layout="nn", comm_rows=0, ctas=1_000),
    Case(*AG, rows=(16, 16, 16), N=48, K=64, ctas=5),
    Case(*AG, 3, rows=(16, 32, 32), N=16, comm_rows=5),
    # rows that come in parts of K, the last of them shorter, which a last wave cut along K splits
    Case(*AG, 3, rows=(17, 31, 40), K=56, N=40, layout="nn", parts=2, block_n=32),
    Case(*AG, rows=(16, 16, 16), N=48, K=64, ctas=5, parts=4),
    Case(*AG, rows=(32, 16, 48), layout="nn", K=96, parts=8, ctas=1_000),
    # the last tiles of ragged shards end with them
    Case(*AG, 3, rows=(17, 31, 40), N=40, layout="nn", block_n=32, comm_rows=0),
    Case(*AG, rows=(16, 32, 32), N=40, bias=True, block_n=32),  # more slices than buffers
    Case(*AG, 3, rows=(17, 31, 40), dtype=torch.bfloat16, scaled=True),
    Case(*RS, K=96, ctas=6, transport="sm", dtype=torch.bfloat16, scaled=True),
    Case(*RS, 3, rows=(17, 20, 33), dtype=torch.bfloat16, scaled=True, wire=True),
    Case(*RS, K=96, ctas=6, transport="sm", dtype=torch.bfloat16, scaled=True, wire=True),
    Case(*RS, rows=(7, 20, 33), comm_rows=5, layout="nn"),
    Case(*RS, 3, K=33, rows=(16, 20), ctas=2, transport="sm"),  # fewer chunks of K than peers
    Case(*RS, 4, K=8, rows=(20, 20), N=16, ctas=1, layout="nn"),
    Case(*RS, 3, K=64, transport="sm", ctas=1_000, layout="nn"),
    Case(*RS, K=64, ctas=6, transport="sm"),
    Case("backward", "hopper", rows=(32, 32, 48), layout="nn"),
    Case("ar", "hopper", rows=(7, 20, 20), layout="nn"),
    Case("ar", "hopper", 3, rows=(16, 48, 33), K=64, N=16, transport="sm", ctas=1_000),
    Case("ar", "hopper", rows=SIX, N=16, captured=True),
    # copy engines push the sums of tiles that take turns: several turns, one resident CTA, one turn
    Case("ar", "hopper", rows=(33, 60, 49), N=80, comm_rows=8, transport="engines", ctas=2),
    Case("ar", "hopper", 3, (33, 48, 20), 80, 64, comm_rows=12, transport="engines", ctas=1),
    Case("ar", "hopper", 4, rows=(20, 7), comm_rows=0, transport="engines", layout="nn", lacking=2),
    Case("ar", "hopper", rows=SIX, N=16, transport="engines", captured=True),
    Case("ar", "hopper", rows=SIX, N=16, transport="engines", two_streams=True),
    # several waves, and a last rank with fewer rows
    Case("ar", "hopper", rows=(20, 41, 41), N=40, comm_rows=0, ctas=1, lacking=1),
    Case("ar", "hopper", 3, (20, 20), 40, 64, transport="sm", ctas=2, layout="nn", lacking=2),
    Case("ar", "hopper", rows=(33, 20), N=40, K=96, ctas=4),
    Case("ar", "hopper", rows=(20,) * 6, N=40, K=8, captured=True, ctas=1),
    Case("ar", "hopper", 3, (20, 7, 33), 40, 64, transport="exchange", ctas=5, layout="nn"),
    Case("ar", "hopper", rows=(33, 20), K=96, transport="exchange", ctas=4, lacking=1),
    Case("ar", "hopper", rows=SIX, N=16, transport="exchange", captured=True),
    Case(*AG, rows=SIX, N=16, captured=True),
    Case(*AG, rows=SIX, N=16, K=64, parts=2, captured=True),
    Case(*RS, rows=SIX, N=16, captured=True),
    Case(*RS, rows=SIX, N=16, transport="sm", captured=True),
    Case(*AG, rows=SIX, N=16, two_streams=True),
    Case(*RS, rows=SIX, N=16, two_streams=True),
    Case("rs", "signalled", 3, rows=(48, 48, 32), group_rows=(32,), layout="nn", gluon=True),
    Case("ar", "signalled", rows=(20, 33), K=40, group_rows=(16, 16), gluon=True, ctas=1_000),
    Case("ar", "signalled", rows=(12,) * 6, N=16, group_rows=(16,), captured=True, gluon=True),
    ExpertCase("dispatch", layout="nn", calls=2, most=12, hopper=True),
    ExpertCase("combine", layout="nn", calls=2, hopper=True, reverse=True),
    ExpertCase("both", 1, experts=3, calls=2, hopper=True, reverse=True),
    ExpertCase("both", 3, experts=1, calls=2, most=9, hopper=True),
    ExpertCase("both", experts=1, calls=3, most=9, captured=True, hopper=True),
]
OF_MUTANTS = [
    case for case in CASES_OF_MUTANTS.values()
    if isinstance(case, Case) and (case.strategy == "hopper" or case.gluon)
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_are_exact(package, case):
    for schedule in STANDARD:
        case.run(package, schedule)


@pytest.mark.parametrize("case", [c for c in CASES + OF_MUTANTS if not c.captured], ids=str)
def test_any_ctas_may_have_to_wait_for_an_sm(package, case):
    """STANDARD has two resident ones in any order, and one in the order of the grid."""
    for seed in range(2):
        case.run(package, Schedule("1 resident", "random", seed, resident=1, any_order=True))


LATE = Schedule("one rank late", "random", seed=3, resident=2, any_order=True, late=True)


@pytest.mark.parametrize("layout", ["nt", "nn"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_every_number_of_ranks(package, world_size, layout):
    """Forward and as dgrad: what `flux-megatron doctor --strategies` says without a GPU. Of experts
    the dgrad of each operation is the other one with the other layout.
    """
    few, common = 2 if world_size < 4 else 1, {"layout": layout, "ctas": 2}
    gathered = ("ag", "hopper", world_size, (16, 32))
    for case in (
        Case(*gathered, N=16, **common), Case(*gathered, N=16, K=48, parts=3, **common),
        *(Case(host, "hopper", world_size, (7, 20), N=16, **common) for host in ("rs", "ar")),
        ExpertCase("both", world_size, few, few, most=9, hopper=True, **common),
    ):  # fmt: skip
        case.run(package, LATE)


def test_the_cases_split_the_last_wave(package):
    """The machine's constants let small problems be split; else these cases would show nothing."""
    split_k, tile = package.hopper_split_tiles, package.problem.Tile(16, 16, 16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split_k, "K_TILES_MIN", 2)
        patch.setattr(split_k, "LOW_PART_K_TILES", 0)
        splits = [
            split_k.split_last_wave(tiles, k_tiles, ctas, tile)
            for tiles, k_tiles, ctas in (
                (4, 6, 6), (8, 6, 6), (6, 4, 5), (6, 11, 5), (8, 6, 3), (8, 4, 6),
            )
        ]  # fmt: skip
    assert [(split.split_tiles, split.parts) for split in splits] == [
        (4, 3), (2, 3), (1, 2), (1, 4), (2, 3), (2, 2),
    ]  # fmt: skip
    assert splits[3].numbers(11)[3:] == (2, 5, 8)

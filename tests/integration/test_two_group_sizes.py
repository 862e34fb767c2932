"""Two tensor-parallel groups of different size in one process: a vision model's and that of the
language model which reads its output.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import pytest
import side_by_side as sbs
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_block import TransformerBlock
from ranks import on_cpu_ranks

from flux_megatron.integration import building
from flux_megatron.lab.train.specs import gpt_block_spec

SEQUENCE, BATCH, HIDDEN = 16, 2, 32


def block(tp: int, group: Any, layers: str, sp: bool) -> TransformerBlock:
    from megatron.core.process_groups_config import ProcessGroupCollection

    sbs.seed()
    config = sbs.settings(tp, sp, torch.float32, hidden_size=HIDDEN, ffn_hidden_size=2 * HIDDEN)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    groups.tp = group
    ours = layers == "flux"
    with building.linears() if ours else contextlib.nullcontext():
        return TransformerBlock(config, gpt_block_spec(config), pg_collection=groups)


def trained(vision: Any, language: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """With sequence parallelism the vision model's ranks share its rows out to more ranks."""
    small, large = (model.pg_collection.tp for model in (vision, language))
    x = x.clone().requires_grad_()
    if language.config.sequence_parallel:
        seen = vision(scatter_to_sequence_parallel_region(x, group=small), None)
        seen = gather_from_sequence_parallel_region(seen, False, group=small)
        y = language(scatter_to_sequence_parallel_region(seen, group=large), None)
    else:
        y = language(vision(x, None), None)
    y.square().sum().backward()
    models = {"vision": vision, "language": language}
    found = {f"{m} {n}": p.grad for m, model in models.items() for n, p in model.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, **found}


@pytest.mark.skipif(
    "pg_collection" not in inspect.signature(TransformerBlock).parameters,
    reason="blocks of this release take groups of another kind",
)
@pytest.mark.parametrize("sp", [True, False], ids=["sp", "no sp"])
@pytest.mark.parametrize(("ranks", "of_vision"), [(2, 1), (4, 2)])
@on_cpu_ranks("ranks", environment={"FLUX_MEGATRON_STRATEGY": "pipelined"})
def test_a_vision_model_of_fewer_ranks_follows_stock(rank, ranks, of_vision, sp):
    sbs.start(ranks)
    own = [dist.new_group([*range(n, n + of_vision)]) for n in range(0, ranks, of_vision)]
    x = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=torch.Generator().manual_seed(3))
    mine, world = own[rank // of_vision], dist.group.WORLD
    results = [
        trained(*(block(n, g, layers, sp) for n, g in ((of_vision, mine), (ranks, world))), x)
        for layers in ("stock", "flux")
    ]
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
    assert sbs.overlapped() == (8 if sp else 4) * (1 + (of_vision > 1))

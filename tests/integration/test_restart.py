"""Training that starts again in the same processes, after a rank did not come, under `enable`."""

from __future__ import annotations

import gc

import post_training as post
import pytest
import side_by_side as sbs
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from ranks import FUSED, on_cpu_ranks

import flux_megatron
from flux_megatron import errors

SHORT = FUSED | {"FLUX_MEGATRON_TIMEOUT_S": "3"}


def destroy_everything() -> None:
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    gc.collect()


@on_cpu_ranks(2, environment=SHORT)
def test_training_starts_again_in_the_same_processes(rank):
    store = dist.distributed_c10d._get_default_store()
    sbs.start(2)
    expected = sbs.one_step(post.with_our_norms(True))
    flux_megatron.enable(strict=True)
    for attempt in range(3):
        model = post.build(True)
        torch.testing.assert_close(sbs.one_step(model), expected, rtol=0, atol=post.BOUND)
        flux_megatron.confirm_step()
        if rank == attempt:  # the third one ends well
            with pytest.raises(errors.SignalTimeout):
                model.decoder.layers[0].mlp.linear_fc1(torch.ones(4, 1, 16))
        dist.barrier()
        del model
        destroy_everything()
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(f"attempt {attempt}", store), rank=rank, world_size=2
        )
        sbs.start(2)
    sbs.overlapped()
    flux_megatron.disable()

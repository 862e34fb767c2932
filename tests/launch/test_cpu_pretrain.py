"""A script of Megatron-LM on CPU tensors, with a CUDA build of torch too."""

from __future__ import annotations

import os
import textwrap

import pytest
from started import python

pytest.importorskip("megatron")

import torch
from checkpoint_tensors import tensors
from ranks import on_cpu_ranks
from torch.utils.data import DataLoader

from flux_megatron.lab.cpu import pretend_gpu

CHECKOUT = os.environ.get("FLUX_MEGATRON_LM")
TINY = """
    pretrain_gpt.py --flux-overlap --flux-strategy pipelined --no-gradient-accumulation-fusion
    --tensor-model-parallel-size 2 --sequence-parallel --num-layers 1 --hidden-size 32
    --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 2
    --global-batch-size 4 --train-iters 4 --lr 1e-3 --hidden-dropout 0.1 --attention-dropout 0.1
    --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --split 90,10,0 --num-workers 0
    --eval-iters 0 --eval-interval 9 --no-masked-softmax-fusion --no-rope-fusion
    --save-interval 2
"""


def run(*words: str, folder: str | None = None) -> str:
    return python(*words, folder=folder, limit_s=240).stdout


@on_cpu_ranks(1)
def test_a_cuda_build_of_torch_asks_no_driver(rank):
    """It would pin memory for a GPU, and optimizers look for the stream of the accelerator. And a
    loader draws nothing at its start: a resumed run would have other numbers than a straight one.
    """

    def ask(*_, **__):
        raise RuntimeError("Found no NVIDIA driver on your system")

    cuda = torch.device("cuda")
    torch.Tensor.pin_memory = torch.accelerator.current_stream = ask
    torch.accelerator.is_available = lambda: torch.cuda.is_available()
    torch.accelerator.current_accelerator = lambda check_available=False: cuda
    pretend_gpu()
    before = torch.get_rng_state()
    batches = DataLoader([1, 2, 3], batch_size=3, pin_memory=True)
    assert next(iter(batches)).tolist() == [1, 2, 3]
    assert [*DataLoader([1, 2])] == [torch.tensor([1]), torch.tensor([2])]
    assert torch.equal(before, torch.get_rng_state())
    assert torch.empty(2, pin_memory=True, device="cuda").shape == (2,)
    for kind in (torch.optim.AdamW, torch.optim.SGD):
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = kind([weight], lr=0.1)
        weight.grad = torch.ones(2)
        optimizer.step()
        assert weight[0] < 1


INSTALLED = {
    "apex/optimizers.py": "FusedAdam = FusedSGD = None",
    "apex/multi_tensor_apply.py": "multi_tensor_applier = None",
    "amp_C.py": "multi_tensor_l2norm = multi_tensor_scale = None",
}
TAKEN = {
    """
from megatron.core.extensions import transformer_engine
transformer_engine.HAVE_TE = True
from flux_megatron.lab.cpu import pretend_gpu
pretend_gpu()
from megatron.core.transformer.transformer_block import LayerNormImpl
from flux_megatron.integration.provider import StockSpecProvider
print(LayerNormImpl.__name__, StockSpecProvider().core_attention().__name__)
""": "FluxNorm FluxCoreAttention",
    """
import sys
sys.path.insert(0, "")
from flux_megatron.lab.cpu import pretend_gpu
pretend_gpu()
from megatron.core.optimizer import Adam, clip_grads
print(Adam.__module__, clip_grads.l2_norm_impl.__name__)
print(sys.modules["transformer_engine.pytorch.optimizers"])
""": "torch.optim.adamw local_multi_tensor_l2_norm None",
}  # fmt: skip


@pytest.mark.parametrize("script", TAKEN, ids=["layers", "optimizers"])
def test_what_needs_a_gpu_is_not_taken_where_it_is_installed(script, tmp_path):
    for name, text in INSTALLED.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert run("-c", script, folder=str(tmp_path)).split() == TAKEN[script].split()


def test_spawned_processes_have_what_an_old_python_lacks(tmp_path):
    """Megatron's writers of checkpoints import the script again, and what it imports."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import multiprocessing
        import typing
        if hasattr(typing, "override") and __name__ == "__main__":
            del typing.override  # as in Python 3.11
        if __name__ == "__main__":
            from flux_megatron.lab.cpu import provide_override
            provide_override()
        from typing import override
        def has_it():
            return override is not None
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                assert pool.apply_async(has_it).get(60)
    """)
    )
    run(str(script))


@pytest.mark.slow
@pytest.mark.skipif(not CHECKOUT, reason="FLUX_MEGATRON_LM names no checkout of Megatron-LM")
def test_resuming_changes_no_bit(tmp_path):
    """Four steps at once, and the last two again from the checkpoint between them."""
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    launch = ["-m", "flux_megatron.cli", "run", "--device", "cpu", "--nproc-per-node", "2"]
    launch += [*TINY.split(), "--data-cache-path", str(tmp_path / "cache")]
    run(*launch, "--save", str(straight), folder=CHECKOUT)
    from_the_middle = ["--load", str(straight), "--ckpt-step", "2", "--exit-on-missing-checkpoint"]
    run(*launch, *from_the_middle, "--save", str(resumed), folder=CHECKOUT)

    assert not (resumed / "iter_0000002").exists()
    whole, again = (tensors(saved / "iter_0000004") for saved in (straight, resumed))
    assert any("exp_avg" in key for key in whole)
    assert whole.keys() == again.keys()
    assert [key for key in whole if not torch.equal(whole[key], again[key])] == []

"""Packed sequences and variable lengths on GPUs: TransformerEngine's specification with our linears
beside its own.

    torchrun --standalone --nproc-per-node 2 tests/gpu/packed.py path/to/core_v0.16.1 packed.jsonl

A GPT of two layers, sequence parallel, bf16, cuDNN's attention. Every batch packs its sequences
into one row (`thd`), each batch has another length, and each strategy sees all of them. The
reference is stock in fp32, of each sequence alone. Ours may be twice as far from it as stock is,
in the tokens' losses and in the gradients.

A row a batch and strategy; exits 1 if one is too far.
"""

from __future__ import annotations

import os
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from gpu_run import Run, finish, start
from torch import Tensor

import flux_megatron
from flux_megatron import settings

BATCHES = (
    (1024, 512, 256, 128, 64, 64),
    (4096,),
    (2, 30, 990, 412),  # M of a shard: 717
    (1000, 24, 6, 500, 2),  # 766
)
STRATEGIES = ("auto", "pipelined", "fused", "hopper", "sequential")
LAYERS, HIDDEN, HEADS, FFN, VOCAB = 2, 1024, 16, 2816, 8192
FACTOR = 2.0

Result = tuple[Tensor, dict[str, Tensor]]  # a loss for each token, and all gradients


def model(spec: Any, dtype: torch.dtype, tp: int) -> Any:
    """On this rank's GPU."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, ffn_hidden_size=FFN, num_attention_heads=HEADS,
        num_query_groups=4, normalization="RMSNorm", gated_linear_unit=True,
        activation_func=F.silu, add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0,
        tensor_model_parallel_size=tp, sequence_parallel=True, params_dtype=dtype,
        pipeline_dtype=dtype, bf16=dtype == torch.bfloat16,
    )  # fmt: skip
    longest = max(map(sum, BATCHES))
    return GPTModel(config, spec(), VOCAB, longest, position_embedding_type="rope").cuda()


def packed(lengths: tuple[int, ...]) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")
    return PackedSeqParams("thd", ends, ends, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths))


def trained(gpt: Any, tokens: Tensor, lengths: tuple[int, ...], pack: bool) -> Result:
    """One forward and backward; tokens [1, sum of lengths] predict their sequence backwards."""
    gpt.zero_grad(set_to_none=True)
    groups = [lengths] if pack else [(length,) for length in lengths]
    losses, begin = [], 0
    for group in groups:
        part = tokens[:, begin : begin + sum(group)]
        begin += sum(group)
        positions = torch.cat([torch.arange(length, device="cuda") for length in group])[None]
        labels = torch.cat([one.flip(1) for one in part.split(group, 1)], 1)
        about = packed(group) if pack else None
        loss = gpt(part, positions, None, labels=labels, packed_seq_params=about)
        (loss.float().sum() / tokens.numel()).backward()
        losses.append(loss.detach().float().flatten())
    return torch.cat(losses), _gradients(gpt)


def _gradients(gpt: Any) -> dict[str, Tensor]:
    """Of whole parameters each rank has the part of its share of the sequence."""
    found = {}
    for name, parameter in gpt.named_parameters():
        gradient = parameter.grad.float()
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(gradient)
        found[name] = gradient
    return found


def apart(result: Result, reference: Result) -> tuple[float, float]:
    """Relative distances of the losses and, over all ranks, of the gradients."""
    losses = float((result[0] - reference[0]).norm() / reference[0].norm())
    squares = torch.zeros(2, device=reference[0].device)
    for name, exact in reference[1].items():
        squares[0] += (result[1][name] - exact).square().sum()
        squares[1] += exact.square().sum()
    dist.all_reduce(squares)
    return losses, float((squares[0] / squares[1]).sqrt())


def models(tp: int) -> tuple[Any, Any, Any]:
    """Stock, ours and the reference, with the same weights."""
    from megatron.core.models.gpt import gpt_layer_specs

    from flux_megatron.integration import use_flux_output_layer
    from flux_megatron.integration.install import build_te_layers_from
    from flux_megatron.integration.provider import FluxTEProvider

    spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec
    stock, reference = model(spec, torch.bfloat16, tp), model(spec, torch.float32, tp)
    build_te_layers_from(FluxTEProvider)
    with use_flux_output_layer():
        ours = model(spec, torch.bfloat16, tp)
    for other in (ours, reference):
        with torch.no_grad():
            weights = dict(stock.named_parameters())
            for name, parameter in other.named_parameters():
                parameter.copy_(weights[name])
    return stock, ours, reference


def compare(run: Run, tp: int) -> bool:
    """Whether all are near enough."""
    stock, ours, reference = models(tp)
    good = True
    for number, lengths in enumerate(BATCHES):
        torch.manual_seed(number)
        tokens = torch.randint(VOCAB, (1, sum(lengths)), device="cuda")
        exact = trained(reference, tokens, lengths, pack=False)
        theirs = apart(trained(stock, tokens, lengths, pack=True), exact)
        for strategy in STRATEGIES:
            os.environ["FLUX_MEGATRON_STRATEGY"] = strategy
            settings.reload()
            flux_megatron.reset_report()
            mine = apart(trained(ours, tokens, lengths, pack=True), exact)
            near = all(m <= FACTOR * t for m, t in zip(mine, theirs, strict=True))
            calls = {f"{p} {s}": n for (p, s), n in flux_megatron.report().calls.items()}
            run.row("packed", lengths=lengths, strategy=strategy, near=near, calls=calls,
                    losses={"stock": theirs[0], "ours": mine[0]},
                    gradients={"stock": theirs[1], "ours": mine[1]})  # fmt: skip
            distances = f"losses {mine[0]:.2e} ({theirs[0]:.2e}), gradients {mine[1]:.2e} "
            where = f"{lengths} {strategy:10} {'near' if near else 'FAR'}"
            run.say(f"{where} {distances} ({theirs[1]:.2e} of stock) {calls}")
            good &= near
    return good


def main(checkout: Path, out: Path, commit: str = "unknown", seconds: float = 200) -> None:
    sys.path.insert(0, str(checkout.resolve()))
    run = start(out, commit, seconds)
    from megatron.core import parallel_state, tensor_parallel

    tp = run.group.size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    finish(run, int(not compare(run, tp)))


if __name__ == "__main__":
    typer.run(main)

"""Peak memory of one MLP's step, forward and backward, with our layers and with megatron-core's.

    torchrun --nproc-per-node 4 tests/gpu/peak_memory.py [--model gpt3-175b] [--M 8192]

Prints one JSON row: bytes that the allocator held at most, the maximum over ranks, and the
symmetric memory that our operations hold besides. Ours may take the stock layers' peak plus that.
The exit code is 0 if it does not take more.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from dataclasses import asdict

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

import flux_megatron
from flux_megatron.bench.suites import MODELS, Model
from flux_megatron.symm.workspace import workspaces
from flux_megatron.tuning import environment

STEPS = 3  # the first makes what later ones reuse


def _mlp(column: type, row: type, model: Model, config: TransformerConfig) -> torch.nn.Sequential:
    """fc1 and fc2, without what stands between them: both sides would have the same of it."""
    common = {"config": config, "init_method": config.init_method, "bias": False}
    fc1 = column(model.hidden, model.ffn, skip_bias_add=True, **common)
    fc2 = row(model.ffn, model.hidden, input_is_parallel=True, skip_bias_add=True, **common)
    return torch.nn.Sequential(fc1, fc2)


def peak_bytes(layers: torch.nn.Sequential, rows: int, hidden: int) -> int:
    """Above what is there before a step: activations, gradients, buffers; of the last step."""
    fc1, fc2 = layers
    for weight in (fc1.weight, fc2.weight):
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    x = torch.randn(rows, 1, hidden, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    peak = 0
    for _ in range(STEPS):
        x.grad = fc1.weight.grad = fc2.weight.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        y, _ = fc2(fc1(x)[0])
        y.backward(torch.ones_like(y))
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    flux_megatron.check()
    return peak


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="gpt3-175b", choices=[*MODELS])
    parser.add_argument("--M", type=int, default=8192)
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    world_size = dist.get_world_size()
    parallel_state.initialize_model_parallel(world_size)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=1, hidden_size=MODELS[options.model].hidden, num_attention_heads=64,
        tensor_model_parallel_size=world_size, sequence_parallel=True, bf16=True,
        params_dtype=torch.bfloat16,
    )  # fmt: skip
    ours = (flux_megatron.ColumnParallelLinear, flux_megatron.RowParallelLinear)
    peaks = {}
    for name, pair in {"stock": (ColumnParallelLinear, RowParallelLinear), "flux": ours}.items():
        layers = _mlp(*pair, MODELS[options.model], config)
        peak = torch.tensor(
            peak_bytes(layers, options.M // world_size, config.hidden_size), device=device
        )
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        peaks[name] = int(peak)
        del layers
        gc.collect()
    (space,) = workspaces()
    within = peaks["flux"] <= peaks["stock"] + space.size_bytes
    if dist.get_rank() == 0:
        where = asdict(environment.of(device))
        print(json.dumps({
            "what": "peak memory", "model": options.model, "M": options.M, "ranks": world_size,
            "peak_bytes": peaks, "workspace_bytes": space.size_bytes, "within": within,
            "calls": str(flux_megatron.report()), "date": time.strftime("%Y-%m-%d"),
            **{key: where[key] for key in ("gpu", "driver", "torch", "triton", "max_connections")},
        }))  # fmt: skip
    dist.destroy_process_group()
    return 0 if within else 1


if __name__ == "__main__":
    raise SystemExit(main())

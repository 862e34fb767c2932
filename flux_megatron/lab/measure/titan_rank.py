"""A rank of `titan`: torchtitan's own entry point, with a Llama-3 of few layers. Its configurations
are functions of this module, which `--config` names.
"""

from __future__ import annotations

import collections
import itertools
import json
import os
import re
import sys
import time
import types
from pathlib import Path
from typing import Any

import torch

PAGE = Path(__file__).parents[3] / "docs" / "pytorch.md"
SEED, TOKENIZER = 7, "tokenizer"
CPU, FUSED = "TITAN_ON_CPU", "dist_gemm"  # a variable; torchtitan's name of its fused projections


def answer_on_cpu() -> None:
    """torch.cpu answers what torchtitan asks an accelerator, before torchtitan is imported."""
    torch._utils._get_available_device_type = lambda: "cpu"
    of_cpu = types.SimpleNamespace(total_memory=1 << 34)
    answers: dict[str, Any] = {
        "get_device_name": lambda *_: "cpu", "get_device_properties": lambda *_: of_cpu,
        "memory_stats": lambda *_: collections.defaultdict(int), "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda *_: None, "set_device": lambda *_: None,
        "current_device": lambda: 0, "device_count": lambda: 1 << 10,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cpu, name, answer)


def as_the_page_says() -> None:
    """Run `flux_titan.py` of the page."""
    section = PAGE.read_text().split("\n## torchtitan\n")[1].split("\n## ")[0]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found, f"{PAGE} has no flux_titan.py"
    module = sys.modules["flux_titan"] = types.ModuleType("flux_titan")
    exec(compile(found[1], "flux_titan.py", "exec"), vars(module))


def gloo_sums(parallelize: Any) -> Any:
    """FSDP scales gradients by an operation that gloo lacks, unless it is told to."""

    def parallelized(model: Any, **options: Any) -> Any:
        model = parallelize(model, **options)
        for module in model.modules():
            if hasattr(module, "set_force_sum_reduction_for_comms"):
                module.set_force_sum_reduction_for_comms(True)
        return model

    return parallelized


def _in_small(spec: Any, tp_gemm_backend: str) -> None:
    from torchtitan.models import llama3
    from torchtitan.models.common import ComplexRoPE
    from torchtitan.models.common.attention import ScaledDotProductAttention

    model, width = spec.model, 64
    model.dim = model.norm.normalized_shape = model.tok_embeddings.embedding_dim = width
    model.vocab_size = model.tok_embeddings.num_embeddings = model.lm_head.out_features = 256
    model.lm_head.in_features = width
    model.layers = llama3._build_llama3_layers(
        n_layers=len(model.layers), dim=width, n_heads=4, n_kv_heads=2, hidden_dim=96,
        rope=ComplexRoPE.Config(dim=16, max_seq_len=256, theta=500000, scaling="llama"),
        attn_backend="flex", tp_gemm_backend=tp_gemm_backend,
    )  # fmt: skip
    for layer in model.layers:  # FlexAttention has no backward on the CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    spec.parallelize_fn = gloo_sums(spec.parallelize_fn)


def made(tp_gemm_backend: str) -> Any:
    """torchtitan's configuration of Llama-3 8B, cut to TITAN_LAYERS layers."""
    from torchtitan.models.llama3 import config_registry, model_registry

    config = config_registry.llama3_8b()
    spec = config.model_spec = model_registry("8B", tp_gemm_backend=tp_gemm_backend)
    spec.model.layers = spec.model.layers[: int(os.environ["TITAN_LAYERS"])]
    if CPU in os.environ:
        _in_small(spec, tp_gemm_backend)
        config.training.mixed_precision_param = "float32"
    config.loss.loss_fn.global_vocab_size = spec.model.vocab_size
    config.dataloader.dataset, config.hf_assets_path = "c4_test", TOKENIZER
    config.profiler.enable_profiling = config.metrics.enable_tensorboard = False
    config.validator.enable = False
    config.metrics.log_freq, config.debug.seed = 1, SEED
    config.training.disable_cuda_graphs = True
    return config


def stock() -> Any:
    return made("default")


def fused() -> Any:
    return made(FUSED)


def ours() -> Any:
    as_the_page_says()
    return made(FUSED)


def main() -> None:
    """The arguments are torchtitan's. Rank 0 prints one line of JSON."""
    if CPU in os.environ:
        answer_on_cpu()
    from torch._dynamo.utils import counters
    from torchtitan import train
    from torchtitan.components.metrics import MetricsProcessor

    from flux_megatron.overlap.report import report

    steps: list[tuple[float, float, float]] = []

    def log(self: Any, step: int, loss: float, *of_step: float, **_: Any) -> None:
        steps.append((loss, of_step[1], time.perf_counter()))

    MetricsProcessor.log = log
    train.main()
    calls = report()
    times = [one[2] for one in steps]
    row = {
        "losses": [one[0] for one in steps], "gradient_norms": [one[1] for one in steps],
        "ms": [round(1e3 * (b - a), 2) for a, b in itertools.pairwise(times)],
        "overlapped": calls.overlapped, "calls": calls.total,
        "fallbacks": {f"{p}: {why}": n for (p, why), n in calls.fallbacks.items()},
        "graphs": counters["stats"]["unique_graphs"],
        "graph_breaks": sum(counters["graph_break"].values()),
    }  # fmt: skip
    if os.environ["RANK"] == "0":
        print("ROW " + json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

"""The snippets of docs/frameworks.md, as far as megatron-core alone can play the frameworks."""

from __future__ import annotations

import json
import re
import shlex
import sys
import types
from pathlib import Path
from typing import Any

import side_by_side as sbs
import torch
import yaml
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from ranks import on_cpu_ranks
from started import python

import flux_megatron
from flux_megatron.lab.measure import rl_slime

PAGE = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text(encoding="utf-8")
WORKERS = {"FLUX_MEGATRON_ENABLE": "1"}  # test_autoload.py has what these do in a process


def snippet(after: str, language: str) -> str:
    """The first block of this language behind these words."""
    found = re.search(rf"```{language}\n(.*?)```", PAGE[PAGE.index(after) :], re.DOTALL)
    assert found is not None
    return found[1]


class Provider:
    """As Megatron-Bridge's: it builds by a spec that it asks for late, then wraps."""

    tensor_model_parallel_size = 1

    def __init__(self) -> None:
        self._hooks: list[Any] = []

    def register_pre_wrap_hook(self, hook: Any) -> None:
        self._hooks.append(hook)

    def provide_distributed_model(self, ddp_config: Any) -> list[Any]:
        config = sbs.settings(self.tensor_model_parallel_size, False, torch.float32)
        spec = get_gpt_layer_local_spec()
        chunks = [GPTModel(config, spec, vocab_size=8, max_sequence_length=8)]
        for hook in self._hooks:
            chunks = hook(chunks)
        return [DistributedDataParallel(config, ddp_config, chunk) for chunk in chunks]


class AutoBridge:
    @classmethod
    def from_hf_pretrained(cls, name: str) -> AutoBridge:
        return cls()

    def to_megatron_provider(self) -> Provider:
        return Provider()


@on_cpu_ranks(2)
def test_megatron_bridge(rank):
    sys.modules["megatron.bridge"] = module = types.ModuleType("megatron.bridge")
    module.AutoBridge = AutoBridge  # type: ignore[attr-defined]
    sbs.start(2)
    ddp = DistributedDataParallelConfig()
    names: dict[str, Any] = {}
    exec(snippet("**Megatron-Bridge.**", "python"), names)
    assert sbs.ours(names["provider"].provide_distributed_model(ddp_config=ddp)[0]) == sbs.ALL
    provider = Provider()
    assert sbs.ours(provider.provide_distributed_model(ddp_config=ddp)[0]) == set()
    flux_megatron.enable()
    assert sbs.ours(provider.provide_distributed_model(ddp_config=ddp)[0]) == sbs.ALL


@sbs.on_tp_ranks(1)
def test_the_call_of_the_page(rank):
    exec(snippet("## What do the calls do?", "python"), {})
    (model,) = Provider().provide_distributed_model(DistributedDataParallelConfig())
    assert sbs.ours(model) == sbs.ALL - {"output_layer"}


BUILT_IN_PYTHON = """
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
import flux_megatron
from flux_megatron.lab.measure import rl_slime

dist.init_process_group("gloo")
parallel_state.initialize_model_parallel(2)
model_parallel_cuda_manual_seed(1)
flux_megatron.enable()
config = TransformerConfig(
    num_layers=1, hidden_size=16, num_attention_heads=2, tensor_model_parallel_size=2,
    sequence_parallel=True, gradient_accumulation_fusion=False,
)
model = GPTModel(config=config, transformer_layer_spec=get_gpt_layer_local_spec(),
                 vocab_size=32, max_sequence_length=8)
tokens, mask = torch.arange(8).view(1, 8), torch.ones(1, 1, 8, 8).triu(1).bool()
model(tokens, tokens, mask, labels=tokens).sum().backward()
done = flux_megatron.report()
assert done.total and done.overlapped == done.total, done
"""


def test_a_model_that_python_builds_runs_without_a_gpu(tmp_path):
    """By the block of the page."""
    script = tmp_path / "train.py"
    script.write_text(snippet("## How do I try it without a GPU?", "python") + BUILT_IN_PYTHON)
    python(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script, limit_s=240,
        CUDA_VISIBLE_DEVICES="", TORCHDYNAMO_DISABLE="1", TRITON_INTERPRET=None,
    )  # fmt: skip


def test_workers_are_given_the_variable():
    given = yaml.safe_load(snippet("**NeMo-RL**", "yaml"))
    assert given["policy"]["megatron_cfg"]["env_vars"] == WORKERS
    words = shlex.split(snippet("**slime**", "bash"))
    given = json.loads(words[words.index("--train-env-vars") + 1])
    assert given == WORKERS | {"FLUX_MEGATRON_ALLOW": rl_slime.ALLOW}
    *_, last = shlex.split(snippet("**verl**", "bash"))
    name, value = last.split("=")
    start, variable = name.rsplit(".", 1)
    assert start == "+ray_kwargs.ray_init.runtime_env.env_vars"
    assert {variable: shlex.split(value)[0]} == WORKERS

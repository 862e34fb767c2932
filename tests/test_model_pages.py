"""The examples of docs/pytorch.md: they train as the models of one process do."""

import contextlib
import importlib.util
import io
import os
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from started import python
from torch import nn

PAGE = Path(__file__).parents[1] / "docs" / "pytorch.md"
# its sections
PLAIN, PLAN, HUGGING_FACE = "", "A plan of parallelize_module", "A Hugging Face model"
ENVIRONMENT = {"FLUX_MEGATRON_STRATEGY": "sequential", "BACKEND": "eager"}
LIMIT_S = 300  # other tests may run beside it
TRANSFORMERS = importlib.util.find_spec("transformers") is not None
OF_LAYERS = "from flux_megatron.nn import ColumnParallelLinear, RowParallelLinear, sum_gradient\n"
UNSHARDED = """
ColumnParallelLinear = RowParallelLinear = torch.nn.Linear
sum_gradient = lambda parameter: parameter
"""


def example(title: str) -> str:
    """The block of Python of a section; the first block of the page."""
    text = PAGE.read_text()
    if not title:
        return re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    section = text.split(f"\n## {title}\n")[1].split("\n## ")[0]
    (found,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return found


def without(title: str, pattern: str) -> str:
    source, count = re.subn(pattern, "", example(title), flags=re.MULTILINE)
    assert count, pattern
    return source


def run(rank: int, source: str, stand_in: bool = False) -> list[float]:
    """The losses that the script prints, in a process that has imported everything."""
    dist.barrier()  # another rank may still be connecting
    dist.destroy_process_group()  # the script joins its own, by the variables that torchrun sets
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    modules = {"transformers": llama()} if stand_in else {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), mock.patch.dict(sys.modules, modules):
        exec(compile(source, "train.py", "exec"), {"__name__": "__main__"})
    return [float(loss) for loss in re.findall(r"loss (\S+)", printed.getvalue())]


def losses(source: str, ranks: int, *args) -> list[float]:
    return run_ranks(run, ranks, source, *args, environment=ENVIRONMENT, limit_s=LIMIT_S)[0]


def by_forks(folder: Path) -> list[float]:
    return run_ranks(run, 2, example(PLAIN))[0]


def by_torchrun(folder: Path) -> list[float]:
    script = folder / "train.py"
    script.write_text(example(PLAIN))
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script]
    on_cpu = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    printed = python(*command, limit_s=LIMIT_S, **on_cpu).stdout
    return [float(loss) for loss in re.findall(r"loss (\S+)", printed)]


@pytest.mark.parametrize("start", [by_forks, pytest.param(by_torchrun, marks=pytest.mark.slow)])
def test_the_first_example_trains_as_the_unsharded_model(start, tmp_path):
    made = start(tmp_path)
    assert OF_LAYERS in example(PLAIN)
    unsharded = losses(example(PLAIN).replace(OF_LAYERS, UNSHARDED), 1)
    assert made == pytest.approx(unsharded, abs=2e-6)  # it prints six digits
    assert len(made) == 10
    assert made == sorted(made, reverse=True)
    assert made[-1] < 0.5 * made[0]


def falling(made: list[float]) -> None:
    assert len(made) == 5
    assert made == sorted(made, reverse=True)
    assert made[0] - made[-1] > 1e-3, "the tolerance below is small beside it"


def test_the_plan_trains_as_pytorch_s_styles_and_as_one_process():
    source = example(PLAN)
    ours = losses(source, 2)
    falling(ours)
    eager = without(PLAN, r"^ +block\.compile.*\n")
    named = re.sub(r"Flux(Colwise|Rowwise)Parallel", r"\1Parallel", eager)
    of_torch = named.replace("flux_megatron.nn", "torch.distributed.tensor.parallel")
    assert ours == pytest.approx(losses(of_torch, 2), abs=2e-6)  # it prints six digits
    alone = re.sub(r"parallelize_module\(block.*", "pass", eager)
    assert ours == pytest.approx(losses(alone, 1), abs=2e-6)


INSTALLED = pytest.mark.skipif(not TRANSFORMERS, reason="transformers is not installed")


@pytest.mark.parametrize("stand_in", [True, pytest.param(False, marks=INSTALLED)])
def test_the_split_attention_and_mlps_train_as_the_model_does(stand_in):
    """The attention keeps its number of heads; each rank has one of the two for keys and values."""
    ours = losses(example(HUGGING_FACE), 2, stand_in)
    falling(ours)
    swap = r"^ +for layer in model.*\n +parallelize_module.*\n +layer\.mlp = .*\n"
    whole = losses(without(HUGGING_FACE, swap), 1, stand_in)
    assert ours == pytest.approx(whole, abs=5e-6)


def llama() -> ModuleType:
    """What the example needs of transformers: names of modules and of their weights, and attention
    that takes its number of heads from the shapes.
    """

    class Attention(nn.Module):
        def __init__(self, c: SimpleNamespace) -> None:
            super().__init__()
            self.head_dim = c.hidden_size // c.num_attention_heads
            of_keys = c.num_key_value_heads * self.head_dim
            self.q_proj, self.o_proj = (
                nn.Linear(c.hidden_size, c.hidden_size, bias=False) for _ in range(2)
            )
            self.k_proj, self.v_proj = (
                nn.Linear(c.hidden_size, of_keys, bias=False) for _ in range(2)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (
                projection(x).view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)
                for projection in (self.q_proj, self.k_proj, self.v_proj)
            )
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return self.o_proj(y.transpose(1, 2).reshape(*x.shape[:-1], -1))

    class Mlp(nn.Module):
        def __init__(self, width: int, inner: int) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
            self.down_proj = nn.Linear(inner, width, bias=False)
            self.act_fn = nn.SiLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    def layer(c: SimpleNamespace) -> nn.ModuleDict:
        width = c.hidden_size
        norms = {"attention_norm": nn.RMSNorm(width), "norm": nn.RMSNorm(width)}
        parts = {"self_attn": Attention(c), "mlp": Mlp(width, c.intermediate_size)}
        return nn.ModuleDict(parts | norms)

    class Llama(nn.Module):
        def __init__(self, c: SimpleNamespace) -> None:
            super().__init__()
            layers = (layer(c) for _ in range(c.num_hidden_layers))
            embed = nn.Embedding(c.vocab_size, c.hidden_size)
            self.model = nn.ModuleDict({"embed": embed, "layers": nn.ModuleList(layers)})

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
            x = self.model.embed(input_ids)
            for layer in self.model.layers:
                x = x + layer.self_attn(layer.attention_norm(x))
                x = x + layer.mlp(layer.norm(x))
            words = x @ self.model.embed.weight.t()
            return SimpleNamespace(
                loss=F.cross_entropy(words[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            )

    module = ModuleType("transformers")
    module.LlamaConfig, module.LlamaForCausalLM = SimpleNamespace, Llama
    return module

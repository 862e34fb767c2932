"""FLUX_MEGATRON_ENABLE=1 in processes whose program knows nothing of us: a framework's workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import post_training as post
import pytest
import side_by_side as sbs
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from ranks import FUSED, on_cpu_ranks

import flux_megatron
from flux_megatron.integration import autoload, install, requirements
from flux_megatron.lab.cpu import pretend_cuda
from flux_megatron.overlap.report import note_call

ROOT = Path(__file__).parents[2]
BEGIN = {"torch first": "import torch", "Megatron first": "import megatron.core.parallel_state"}
WORKER = """
import sys
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer import TransformerConfig
held = get_gpt_layer_local_spec().submodules.mlp.submodules.linear_fc2
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
initialize = parallel_state.initialize_model_parallel
initialize(1)
{late}
config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2,
                           use_cpu_initialization=True)
options = {{"config": config, "init_method": torch.nn.init.ones_, "bias": False,
           "input_is_parallel": True, "skip_bias_add": False}}
print(type(held(8, 8, **options)).__module__, type(RowParallelLinear(8, 8, **options)).__module__)
print(parallel_state.initialize_model_parallel.__module__, hasattr(initialize, "__wrapped__"))
print(sum(type(f).__module__.startswith("flux") for f in sys.meta_path))
"""
OURS, STOCK = "flux_megatron.integration.stand_ins", "megatron.core.tensor_parallel.layers"


@pytest.fixture
def installed(tmp_path):
    """The entry points of pyproject.toml, as they are where this package is installed."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    group, line = '[project.entry-points."torch.backends"]\n', 'flux_megatron = "flux_megatron:arm"'
    assert group + line in text
    folder = tmp_path / "flux_megatron_here-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: flux-megatron-here\nVersion: 1\n"
    )
    (folder / "entry_points.txt").write_text("[torch.backends]\n" + line.replace('"', ""))
    return tmp_path


def run(script: str, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    path = [str(ROOT), str(folder), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), **more}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        capture_output=True, text=True, env=environment, timeout=120,
    )  # fmt: skip


LATE = "assert 'flux_megatron' not in sys.modules; import flux_megatron"
# else layers that --flux-layers leaves to Megatron would be ours
LAUNCH = """
from flux_megatron.integration import flags, install
install.install(flags.FluxOptions(layers=("qkv",)))
"""
CASES = {
    "torch first": (BEGIN["torch first"], "", {}, f"{OURS} {OURS}"),
    "Megatron first": (BEGIN["Megatron first"], "", {}, f"{OURS} {OURS}"),
    "without the variable": ("", "", {"FLUX_MEGATRON_ENABLE": "0"}, f"{STOCK} {STOCK}"),
    # Megatron's groups are there already
    "an import of ours": ("", LATE, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, f"{OURS} {OURS}"),
    "the flag of a launch is stronger": (LAUNCH, "", {}, STOCK),
}


@pytest.mark.parametrize("case", CASES)
def test_a_worker_gets_our_layers_by_the_variable_alone(installed, case):
    begin, late, more, expected = CASES[case]
    named = {"FLUX_MEGATRON_ENABLE": "1", **more}
    done = run(begin + WORKER.format(late=late), installed, **named)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith("flux_megatron: ")]
    assert lines[0].endswith(expected)
    if not late and begin != LAUNCH:
        ours = more.get("FLUX_MEGATRON_ENABLE") != "0"
        assert lines[1:] == [f"megatron.core.parallel_state {ours}", "0"]


@pytest.mark.parametrize("variable", ["ENABLE=yes", "TUNE=x", "CACHE=~nobody9/x"])
def test_a_wrong_value_fails_where_our_layers_are_enabled_and_not_at_the_import_of_torch(
    installed, variable
):
    name, _, value = variable.partition("=")
    named = {"FLUX_MEGATRON_ENABLE": "1", f"FLUX_MEGATRON_{name}": value}
    done = run("import torch; print('imported')", installed, **named)
    assert (done.stdout, done.returncode) == ("imported\n", 0), done.stderr
    done = run(WORKER.format(late=""), installed, **named)
    assert done.returncode
    assert f"ValueError: FLUX_MEGATRON_{name}={value!r}, expected " in done.stderr


# as where a container runs under a number that its image does not know
HOMELESS = """
import os
os.environ.pop("HOME", None)
os.getuid = lambda: 2**31 - 12345
import torch
import flux_megatron
from flux_megatron import settings
print("imported")
print(settings.get().cache)
"""


@pytest.mark.parametrize("cache", ["", "~/plans", "/somewhere"])
def test_torch_can_be_imported_where_nobody_has_a_home_folder(installed, cache):
    done = run(HOMELESS, installed, FLUX_MEGATRON_ENABLE="1", FLUX_MEGATRON_CACHE=cache)
    assert done.stdout.splitlines() == ["imported", *([cache] if cache == "/somewhere" else [])]
    if cache != "/somewhere":
        given = f"={cache!r}, " if cache else " is not given, by default '~/.cache/flux_megatron', "
        error = f"ValueError: FLUX_MEGATRON_CACHE{given}expected a folder: no home folder is known"
        assert f"{error} here for ~\n" in done.stderr


OF_ALL = ("tp", "tp_cp", "mp")
OF_ONE = ("cp", "pp", "dp", "dp_cp", "ep", "expt_tp", "expt_dp", "tp_ep", "tp_ep_pp")


@pytest.mark.parametrize("way", ["variable", "enable", "disable"])
@on_cpu_ranks(2, environment=FUSED | {"FLUX_MEGATRON_STRICT": "1"})
def test_a_model_with_groups_of_its_own(rank, way):
    """As Megatron-Bridge's with `use_decentralized_pg`: nobody calls for Megatron's groups."""
    pretend_cuda()
    everybody, alone = dist.new_group([0, 1]), [dist.new_group([one]) for one in range(2)][rank]
    groups = {**dict.fromkeys(OF_ALL, everybody), **dict.fromkeys(OF_ONE, alone)}
    collection = ProcessGroupCollection(**groups, embd=None, pos_embd=None)
    parallel_state._set_global_memory_buffer()

    def build() -> GPTModel:
        tensor_parallel.model_parallel_cuda_manual_seed(
            7, force_reset_rng=True, tp_rank=rank, ep_rank=0, etp_rank=0
        )
        torch.manual_seed(7)
        config = post.config(False, normalization="LayerNorm")
        return GPTModel(
            config,
            post.get_gpt_layer_local_spec(),
            post.VOCAB,
            64,
            position_embedding_type="rope",
            pg_collection=collection,
        )

    def trained(model: GPTModel) -> list[torch.Tensor]:
        tokens = torch.arange(8)[None]
        y = model(tokens, tokens, None)
        y.square().sum().backward()
        return [y, *(parameter.grad for parameter in model.parameters())]

    expected = trained(build())
    autoload.arm(flux_megatron.enable)
    if way == "enable":  # the program's own word is stronger
        flux_megatron.enable(layers=["qkv"], strict=False)
    if way == "disable":
        flux_megatron.disable()
    model = build()
    ours = {"variable": sbs.ALL, "enable": {"linear_qkv"}, "disable": set()}[way]
    assert sbs.ours(model) == ours
    assert sbs.ours(build()) == ours
    torch.testing.assert_close(trained(model), expected, rtol=0, atol=post.BOUND)
    assert (autoload.made, len(flux_megatron.report().models)) == (2 * len(ours), bool(ours))
    assert not parallel_state.model_parallel_is_initialized()
    flux_megatron.disable()
    assert sbs.ours(build()) == set()


GROUPS = """
import torch.distributed as dist
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
"""
MEGATRON = "import torch, megatron.core.parallel_state\n"
INITIALIZED = "megatron.core.parallel_state.initialize_model_parallel(1)\n"
FORKS = "import os\nif not os.fork(): raise SystemExit\nos.wait()\n"
SAID = "flux_megatron: FLUX_MEGATRON_ENABLE=1, but no layer of process "
# program, strict, RANK: status, the reason
UNUSED = {
    "no model": (MEGATRON, "0", "0", 0, "megatron-core made no groups and no module"),
    "no model, strict": (MEGATRON + FORKS, "1", "0", 1, "megatron-core made no groups and no mod"),
    "another rank": (MEGATRON, "1", "1", 1, ""),
    "no rank of a job": (MEGATRON, "1", None, 0, "megatron-core made no groups and no module"),
    "no layer": (MEGATRON + GROUPS + INITIALIZED, "1", None, 1, "megatron-core built none of the"),
    "without Megatron": ("import torch" + GROUPS, "1", "0", 0, "megatron-core was not imported"),
    "a tool": ("import torch", "1", "0", 0, ""),
    "its own word": (MEGATRON + "import flux_megatron; flux_megatron.enable()", "1", "0", 0, ""),
    "an error": (MEGATRON + "raise KeyError", "1", "0", 1, ""),
}


@pytest.mark.parametrize("case", UNUSED)
def test_a_variable_of_which_nothing_comes(installed, case):
    program, strict, rank, status, why = UNUSED[case]
    named = {"FLUX_MEGATRON_ENABLE": "1", "FLUX_MEGATRON_STRICT": strict}
    done = run(program, installed, **named, **({"RANK": rank} if rank else {}))
    assert done.returncode == status, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(SAID)]
    assert len(lines) == bool(why)
    assert all(f"is ours: {why}" in line for line in lines)


def test_what_is_said_at_exit(monkeypatch, capsys):
    def said(process: int = os.getpid()) -> str:
        monkeypatch.setattr(requirements, "_logged", set())
        install._log_calls(process)
        return capsys.readouterr().out

    monkeypatch.delattr(sys, "last_value", raising=False)
    flux_megatron.reset_report()
    nothing = "flux_megatron: no call came to our layers, so nothing was overlapped\n"
    assert said() == nothing
    assert said(os.getppid()) == ""  # a fork that makes no call
    monkeypatch.setattr(sys, "last_value", KeyError(), raising=False)
    assert said() == ""  # nothing of calls that an error forestalled
    note_call("ag_gemm", "fused")
    for process in (os.getpid(), os.getppid()):
        assert said(process).startswith("flux_megatron: 1 of 1 calls overlapped")
    flux_megatron.reset_report()

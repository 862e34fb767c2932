"""FLUX_MEGATRON_ENABLE=1 in processes whose program knows nothing of us: a framework's workers."""

from __future__ import annotations

import os
import re
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
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from ranks import FUSED, on_cpu_ranks
from started import python

import flux_megatron
from flux_megatron import settings
from flux_megatron.integration import autoload, install, requirements
from flux_megatron.integration.flags import FluxOptions
from flux_megatron.lab.cpu import pretend_cuda
from flux_megatron.overlap.report import note_call

ROOT = Path(__file__).parents[2]
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
OURS = "flux_megatron.integration.stand_ins"


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
    variables = {"PYTHONPATH": os.pathsep.join(path), "TORCHDYNAMO_DISABLE": "1", **more}
    return python("-W", "ignore", "-c", script, code=None, **variables)


# how the worker begins, what it does after Megatron has begun, and more variables
LATE = "assert 'flux_megatron' not in sys.modules; import flux_megatron"
CASES = {
    "torch first": ("import torch", "", {}),
    "Megatron first": ("import megatron.core.parallel_state", "", {}),
    # Megatron's groups are there already
    "an import of ours": ("", LATE, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_worker_gets_our_layers_by_the_variable_alone(installed, case):
    begin, late, more = CASES[case]
    done = run(begin + WORKER.format(late=late), installed, FLUX_MEGATRON_ENABLE="1", **more)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith("flux_megatron: ")]
    assert lines[0] == f"{OURS} {OURS}"
    assert late or lines[1:] == ["megatron.core.parallel_state True", "0"]


@on_cpu_ranks(1)
def test_without_the_variable_nothing_waits(rank):
    for value in ("0", "1"):
        os.environ["FLUX_MEGATRON_ENABLE"] = value
        flux_megatron.arm()  # as torch does at the end of its import
        assert bool(autoload._waiting) is (value == "1")
    sbs.start(1)  # and builds no layer
    assert autoload._unused() == "megatron-core built none of the layers that ours stand for"


@on_cpu_ranks(1)
def test_the_flag_of_a_launch_is_stronger(rank):
    """Else layers that --flux-layers leaves to Megatron would be ours."""
    autoload.arm(flux_megatron.enable)
    install.install(FluxOptions(layers=("qkv",)))
    assert not autoload._waiting


@pytest.mark.parametrize("variable", ["ENABLE=yes", "TUNE=x", "CACHE=~nobody9/x"])
@on_cpu_ranks(1)
def test_a_wrong_value_fails_where_our_layers_are_enabled(rank, variable):
    name, _, value = variable.partition("=")
    os.environ |= {"FLUX_MEGATRON_ENABLE": "1", f"FLUX_MEGATRON_{name}": value}
    settings.get.cache_clear()
    flux_megatron.arm()
    with pytest.raises(ValueError, match=re.escape(f"FLUX_MEGATRON_{name}={value!r}, expected ")):
        sbs.start(1)


WRONG = {"ENABLE": "yes", "TUNE": "x", "CACHE": "~nobody9/x"}
# as where a container runs under a number that its image does not know
HOMELESS = """
import os
os.environ.pop("HOME", None)
os.getuid = lambda: 2**31 - 12345
import torch
from flux_megatron import settings
os.environ |= {"FLUX_MEGATRON_ENABLE": "1", "FLUX_MEGATRON_TUNE": "off"}
for cache in ("", "~/plans", "/somewhere"):
    os.environ["FLUX_MEGATRON_CACHE"] = cache
    try:
        print(settings.reload().cache)
    except ValueError as error:
        print(error)
"""


def test_torch_can_be_imported_with_wrong_values_and_where_nobody_has_a_home_folder(installed):
    done = run(HOMELESS, installed, **{f"FLUX_MEGATRON_{n}": value for n, value in WRONG.items()})
    error = "expected a folder: no home folder is known here for ~"
    assert done.stdout.splitlines() == [
        f"FLUX_MEGATRON_CACHE is not given, by default '~/.cache/flux_megatron', {error}",
        f"FLUX_MEGATRON_CACHE='~/plans', {error}",
        "/somewhere",
    ], done.stderr


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
        config, spec = post.config(False, normalization="LayerNorm"), get_gpt_layer_local_spec()
        return GPTModel(
            config, spec, post.VOCAB, 64, position_embedding_type="rope", pg_collection=collection
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


STRICT = """
import os, torch, megatron.core.parallel_state
if not os.fork(): raise SystemExit
os.wait()
"""
SAID = "flux_megatron: FLUX_MEGATRON_ENABLE=1, but no layer of process "
NO_MODULE = "megatron-core made no groups and no module"


def test_a_rank_of_which_nothing_comes_ends_with_an_error_in_strict_mode(installed):
    """Its forks say nothing."""
    strict = {"FLUX_MEGATRON_ENABLE": "1", "FLUX_MEGATRON_STRICT": "1", "RANK": "0"}
    done = run(STRICT, installed, **strict)
    assert done.returncode == 1, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith(SAID)
    assert line.endswith(f"is ours: {NO_MODULE}")


# what autoload knows, whether Megatron is imported and has groups, strict, RANK: why, and whether
# that ends the process
WAITS, BEGAN, ITS_OWN_WORD = (len, False), (None, True), (None, False)
UNUSED = {
    "no model": (WAITS, True, False, "0", "0", NO_MODULE, False),
    "another rank": (WAITS, True, False, "1", "1", "", True),
    "no rank of a job": (WAITS, True, False, "1", "", NO_MODULE, False),
    "no layer": (BEGAN, True, True, "1", "", "megatron-core built none of the layers", True),
    "without Megatron": (WAITS, False, True, "1", "0", "megatron-core was not imported", False),
    "a tool": (WAITS, False, False, "1", "0", "", False),
    "its own word": (ITS_OWN_WORD, True, False, "1", "0", "", False),
    "an error": (WAITS, True, False, "1", "0", "", False),
}


@pytest.mark.parametrize("case", UNUSED)
def test_a_variable_of_which_nothing_comes(case, monkeypatch, capsys):
    (waiting, enabled), imported, groups, strict, rank, why, ends = UNUSED[case]
    state = {"_waiting": waiting, "_enabled": enabled, "made": 0, "_has_groups": lambda: groups}
    for name, value in state.items():
        monkeypatch.setattr(autoload, name, value)
    if not imported:
        monkeypatch.delitem(sys.modules, autoload.PARALLEL_STATE)
    if rank:
        monkeypatch.setenv("RANK", rank)
    if case == "an error":
        monkeypatch.setattr(sys, "last_value", KeyError(), raising=False)
    monkeypatch.setenv("FLUX_MEGATRON_STRICT", strict)
    settings.reload()
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    autoload._end(os.getpid())
    monkeypatch.undo()
    settings.reload()
    said = capsys.readouterr().out
    assert exits == [1] * ends
    assert said.startswith(SAID) if why else not said
    assert why in said


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

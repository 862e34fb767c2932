"""Arguments that come out of a checkpoint, after those of the command line were looked at."""

from __future__ import annotations

import argparse
import sys
import types

import pytest
from test_requirements import add_megatron_arguments, megatron  # noqa: F401, a fixture

from flux_megatron.integration import checkpoint_arguments, install, replaced, spec_argument
from flux_megatron.integration.flags import add_flux_arguments


@pytest.fixture
def load(megatron, monkeypatch):  # noqa: F811
    """Megatron's modules; returns what loads arguments where Megatron calls it."""

    def load_args_from_checkpoint(args, load_arg="load", **saved):
        vars(args).update(saved)
        return args, "those of the checkpoint"

    modules = [types.ModuleType(name) for name in replaced.row(checkpoint_arguments.LOADS).where]
    for module in modules:
        module.load_args_from_checkpoint = load_args_from_checkpoint
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(install, "install", lambda *given: None)
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py"])
    return [lambda *given, m=module, **named: m.load_args_from_checkpoint(*given, **named)
            for module in modules]  # fmt: skip


def parsed(*line: str) -> argparse.Namespace:
    parser = add_flux_arguments(add_megatron_arguments(argparse.ArgumentParser()))
    return parser.parse_args([*line, "--transformer-impl", "local", "--use-checkpoint-args"])


@pytest.mark.parametrize("where", [0, 1])
def test_arguments_of_a_checkpoint_are_looked_at(load, where, capsys):
    args = parsed("--flux-overlap")
    install.install_from(args)
    install.install_from(args)  # Megatron parses up to three times
    assert load[where](args, num_layers=4) == (args, "those of the checkpoint")
    assert args.num_layers == 4
    with pytest.raises(SystemExit) as end:
        load[where](args, "pretrained_checkpoint", moe_latent_size=8)
    assert end.value.code == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "moe-latent-size" in x]
    assert line.endswith("(set to 8); --flux-allow moe-latent-size goes on")
    args.flux_allow = ["moe-latent-size"]
    load[where](args)


def test_without_our_flag_nothing_is_looked_at(load):
    args = parsed()
    install.install_from(args)
    load[0](args, moe_latent_size=8)


def test_a_specification_that_cannot_look_at_them_says_so(load, monkeypatch):
    args = parsed()
    args.mtp_num_layers = args.num_experts = None
    monkeypatch.setattr(spec_argument, "_parsed_arguments", lambda: args)
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--use-checkpoint-args"])
    with pytest.raises(ValueError, match="checkpoint are looked at with --flux-overlap alone"):
        spec_argument.layer_spec_of_this_run()

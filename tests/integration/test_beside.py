"""Whether a run's other communication shares the GPU, as Megatron's arguments say it."""

from __future__ import annotations

import argparse
import os

import pytest
from test_bootstrap import _restored, parse, spec_module  # noqa: F401, a fixture

from flux_megatron import settings
from flux_megatron.integration import install
from flux_megatron.integration.beside import overlapped_in

TWO_REPLICAS = {"world_size": 8, "tensor_model_parallel_size": 4}
INTERLEAVED = {"virtual_pipeline_model_parallel_size": 2}
TWO_STAGES = {"world_size": 8, "tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2}
REDUCED, GATHERED = {"overlap_grad_reduce": True}, {"overlap_param_gather": True}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, False),
        (TWO_REPLICAS, False),
        (TWO_REPLICAS | REDUCED, True),
        (TWO_REPLICAS | GATHERED, True),
        (TWO_REPLICAS | REDUCED | {"context_parallel_size": 2}, True),
        (TWO_REPLICAS | REDUCED | {"tensor_model_parallel_size": 8}, False),
        (TWO_STAGES | REDUCED, False),
        (TWO_STAGES | {"overlap_p2p_comm": True}, False),
        (TWO_STAGES | {"num_layers_per_virtual_pipeline_stage": 2}, True),
        (TWO_STAGES | {"num_virtual_stages_per_pipeline_rank": 2}, True),
        (TWO_STAGES | INTERLEAVED | {"overlap_p2p_comm": True}, True),
        (TWO_STAGES | INTERLEAVED | {"overlap_p2p_comm": False}, False),
        (TWO_REPLICAS | INTERLEAVED, False),
    ],
)  # fmt: skip
def test_overlapped_in(given, expected):
    assert overlapped_in(argparse.Namespace(**given)) is expected


def test_before_megatron_validates_its_arguments_torchrun_tells_the_ranks(monkeypatch):
    given = {**TWO_REPLICAS, **REDUCED, "world_size": None}
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert overlapped_in(argparse.Namespace(**given))
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert not overlapped_in(argparse.Namespace(**given))


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize(
    ("setting", "overlap", "expected"),
    [("", True, "1"), ("", False, "0"), ("auto", True, "1"), ("0", True, "0"), ("1", False, "1")],
)
@pytest.mark.parametrize("way", ["flag", "spec"])
def test_auto_is_what_the_arguments_say(setting, overlap, expected, way):
    os.environ.pop("FLUX_MEGATRON_BESIDE", None)
    if setting:
        os.environ["FLUX_MEGATRON_BESIDE"] = setting
    more = TWO_REPLICAS | {"overlap_grad_reduce": overlap}
    if way == "spec":
        spec_module(**more)
    else:
        args = parse("--flux-overlap")
        vars(args).update(more)
        install.install_from(args)
        install.install_from(args)  # Megatron parses its arguments more than once
    assert settings.get().beside == expected

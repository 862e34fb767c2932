"""The report says what really ran: calls, fallbacks with reasons, the share, strict mode."""

import os
import warnings
from collections import Counter
from contextlib import nullcontext
from itertools import starmap
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import Case, check
from ranks import DEVICE, FUSED, here, on_device_ranks

import flux_megatron
from flux_megatron import ops, pieces
from flux_megatron.embedding import fused_bags
from flux_megatron.expert_parallel import call
from flux_megatron.expert_parallel import ops as expert_ops
from flux_megatron.nn.functions import column_parallel_linear
from flux_megatron.overlap import calls, registry
from flux_megatron.overlap import report as report_module
from flux_megatron.overlap.report import (
    Layers,
    Report,
    forget_layers,
    note_call,
    note_fallback,
    note_layers,
    report,
    reset_report,
)
from flux_megatron.problem import Pattern, Plan
from flux_megatron.symm.workspaces import workspace


@pytest.fixture(autouse=True)
def _fresh_report():
    reset_report()
    yield
    reset_report()


def test_counts_and_share():
    for pattern, strategy in [("ag_gemm", "fused"), ("ag_gemm", "fused"), ("gemm_rs", "pipelined")]:
        note_call(pattern, strategy)
    note_call(Pattern.GEMM_RS, "sequential")
    now = report()
    assert now.calls == {
        ("ag_gemm", "fused"): 2, ("gemm_rs", "pipelined"): 1, ("gemm_rs", "sequential"): 1
    }  # fmt: skip
    assert (now.total, now.overlapped, now.chosen_sequential, now.share) == (4, 3, 1, 0.75)
    assert str(now).startswith("3 of 4 calls overlapped, 1 sequential by their plan, workspace")
    note_call("ag_gemm", "fused")
    assert now.total == 4, "a report does not change afterwards"


def test_a_fallback_is_counted_as_sequential_and_said_once():
    note_call("ag_gemm", "fused")
    noted = {("ag_gemm", "no reason at all"): 3, ("ag_gemm", "other"): 1, ("gemm_rs", "other"): 1}
    with pytest.warns(UserWarning, match="ag_gemm runs without overlap: no reason at all") as said:
        list(starmap(note_fallback, Counter(noted).elements()))
    assert len(said) == 3
    now = report()
    assert now.fallbacks == noted
    assert (now.share, now.chosen_sequential) == (1 / 6, 0)
    assert str(now).splitlines() == [
        "1 of 6 calls overlapped, workspace 0.0 MiB",
        "  ag_gemm fused: 1", "  ag_gemm sequential: 4", "  gemm_rs sequential: 1",
        "  ag_gemm fell back 3 times: no reason at all", "  ag_gemm fell back 1 times: other",
        "  gemm_rs fell back 1 times: other",
    ]  # fmt: skip


def test_a_reset_starts_anew():
    for _ in range(2):
        with pytest.warns(UserWarning, match="again"):
            note_fallback("ag_gemm", "again")
        reset_report()
    assert report() == Report({}, {}, 0)
    assert report().share == 1.0
    assert report().total == report().overlapped == 0


class Model:
    """A chunk of one."""


def test_each_model_counts_once(monkeypatch):
    monkeypatch.setattr(report_module, "_models", [])
    chunks, other = [Model(), Model()], Model()
    note_layers(Layers(2, 9, {("fc", "a class"): 7}), chunks)
    note_layers(Layers(8, 9, {("head", "a class"): 1}), chunks[1:])  # as counted again
    assert str(report()).splitlines()[1:] == [
        "  8 of 9 tensor-parallel linear layers are ours; not head (1): a class"
    ]
    for one in (other, Model(), Model()):
        note_layers(Layers(9, 9, {}), [one])
    assert str(report()).splitlines()[1:] == [
        "  1 model: 8 of 9 tensor-parallel linear layers are ours; not head (1): a class",
        "  3 models: 9 of 9 tensor-parallel linear layers are ours",
    ]
    assert (report().layers.ours, report().layers.total) == (35, 36)
    forget_layers([other, chunks[1]])
    assert report().models == (Layers(9, 9, {}),) * 2  # those that are gone too


def test_a_fork_counts_what_it_does_itself():
    note_call("ag_gemm", "fused")
    if not (child := os.fork()):
        note_call("gemm_rs", "fused")
        os._exit(report().calls != {("gemm_rs", "fused"): 1})
    assert os.waitpid(child, 0)[1] == 0
    assert report().calls == {("ag_gemm", "fused"): 1}


@on_device_ranks(2, environment=FUSED)
def test_a_call_is_counted_when_it_is_enqueued(rank):
    """Calls that end with an error were not enqueued: no strategy has any in the report."""
    x, w = torch.ones(4, 4, device=DEVICE), torch.ones(4, 4, device=DEVICE)
    group = dist.group.WORLD

    def fails(module, name: str, operation, *given, **options) -> None:
        with mock.patch.object(module, name, side_effect=KeyError), pytest.raises(KeyError):
            operation(*given, group, **options)

    for operation in ops.OPERATIONS.values():
        operation(x, w, group)
    for operation in (*ops.OPERATIONS.values(), pieces.start_gemm_rs, pieces.start_gemm_ar):
        fails(calls, "InFlight", operation, x, w)
    fails(calls, "start_gather", pieces.start_gather, x, w)
    fails(calls, "start_gather", pieces.start_gather_and_gemm_rs, x, x, w)
    bags = torch.zeros(2, dtype=torch.int64, device=DEVICE), torch.arange(3, device=DEVICE)
    fails(fused_bags, "forward", flux_megatron.embedding_all_to_all, w[None], *bags)
    given = x[:2], w[None], torch.ones(2, 1, dtype=torch.int32, device=DEVICE)
    fails(call.STRATEGIES["fused"], "a2a_gemm", expert_ops.a2a_gemm, *given, capacity=2)
    fails(call.STRATEGIES["fused"], "gemm_a2a", expert_ops.gemm_a2a, *given, tokens=2)
    assert report().calls == {(str(pattern), "fused"): 1 for pattern in ops.OPERATIONS}
    assert report().fallbacks == {}


@on_device_ranks(2, environment=FUSED)
def test_a_gather_alone_counts_and_says_why_it_falls_back(rank):
    """As in a backward without dx."""
    x, w = torch.ones(4, 4, device=DEVICE), torch.ones(4, 4, device=DEVICE)
    refused = mock.patch.object(registry, "refusal", return_value="nothing can run")
    for fallback in (False, True):
        workspace(dist.group.WORLD, here()).checked.clear()
        said = pytest.warns(UserWarning, match="ag_gemm runs without overlap: nothing can run")
        with refused if fallback else nullcontext(), said if fallback else nullcontext():
            gather = pieces.start_gather(x, w, dist.group.WORLD)
        assert gather.complete().shape == (8, 4)
        gather.close()
    assert report().calls == {("ag_gemm", "fused"): 1, ("ag_gemm", "sequential"): 1}
    assert report().fallbacks == {("ag_gemm", "nothing can run"): 1}


@on_device_ranks(2, environment=FUSED)
def test_real_calls(rank):
    x, w = torch.ones(2, 3, device=DEVICE), torch.ones(2, 4, device=DEVICE)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for seed in range(2):
            check(Case("ag_gemm", 5, 4, 3, seed=seed))
            check(Case("gemm_rs", 5, 4, 3, seed=seed, plan=Plan("pipelined")))
            check(Case("gemm_rs", 5, 4, 3, seed=seed, plan=Plan("sequential")))
            check(Case("ag_gemm", 5, 4, 3, seed=seed, dtype=torch.float64))
        with pytest.raises(ValueError, match="equal K"):
            column_parallel_linear(x, w, None, group=dist.group.WORLD)
    now, reason = flux_megatron.report(), "dtype float64 is none of float32, bfloat16, float16"
    assert now.calls == {
        ("ag_gemm", "fused"): 2, ("gemm_rs", "pipelined"): 2,
        ("gemm_rs", "sequential"): 2, ("ag_gemm", "sequential"): 2,
    }  # fmt: skip
    # a plan that asks for sequential is no fallback
    assert now.fallbacks == {("ag_gemm", reason): 2}
    said = [str(one.message) for one in said if "flux_megatron" in str(one.message)]
    assert said == [f"flux_megatron: ag_gemm runs without overlap: {reason}"]
    assert (now.share, now.chosen_sequential) == (0.5, 2)
    assert now.workspace_bytes > 0

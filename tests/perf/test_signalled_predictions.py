"""What is predicted of calls between GPUs that share no memory, beside rows, and by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from step_costs import A100

from flux_megatron.lab.perf import hardware, linear, mailboxes
from flux_megatron.lab.perf.collectives import all_reduce_us, collective_us
from flux_megatron.lab.perf.operator_cost import moved_bytes
from flux_megatron.lab.simulate.predictions import predict
from flux_megatron.launch.errors import ExperimentError
from flux_megatron.launch.workload import Link, Nics
from flux_megatron.patterns import Pattern
from flux_megatron.problem import Problem

ROWS = Path(__file__).parents[2] / "docs/results/h200x2/machines.jsonl"
FITTED = ("ab8e31bf", "b3a3e96b")
GATHERS = ("f9cb4548", "9ded3eb8")  # of one kernel; the latter leaves SMs to others
NODE = replace(A100, gpu="H200", gpus_per_node=2, nodes=2)


def joined(gbps):
    """An H200 that NCCL alone joins to others."""
    return replace(hardware.of(replace(NODE, link=Link("host", gbps))), mailboxes=False)


def problem_of(case):
    name, _, sizes = case.partition(":")
    M, N, K = map(int, sizes.split("x"))
    rows = M // 2 if name == "ag_gemm" else M
    return Problem.of_operands(Pattern(name), rows, N, K, "bfloat16", 2, "nt", "cuda")


def alone_us(problem, gpu):
    collective = all_reduce_us if problem.pattern is Pattern.GEMM_AR else collective_us
    return collective(gpu, moved_bytes(problem), problem.world_size)


def rate_of(problem, us):
    """The link on which the collective takes so long."""
    one = alone_us(problem, joined(1.0))
    latency = one - (one - alone_us(problem, joined(2.0))) * 2
    return (one - latency) / (us - latency)


def fastest(of):
    """By run and call, of the rows that this holds for."""
    found = {}
    for row in map(json.loads, ROWS.read_text().splitlines()):
        if row["table"] == "machines" and of(row):
            known = found.setdefault((row["run"], row["case"]), row)
            if row["us"] < known["us"]:
                found[row["run"], row["case"]] = row
    return found.values()


def is_of_bands(row):
    commits = GATHERS if row["case"].startswith("ag_gemm") else FITTED
    return row["commit"] in commits and row["link"] == "host memory"


def is_by_mailboxes(row):
    return row["link"] == "mailboxes" and row["candidate"].startswith("hopper")


def test_errors_are_those_of_the_rows():
    errors = []
    for row in fastest(is_of_bands):
        problem = problem_of(row["case"])
        gpu = joined(rate_of(problem, row["collective_us"]))
        assert alone_us(problem, gpu) == pytest.approx(row["collective_us"], rel=1e-3)
        errors.append(linear.operator_us(problem, "auto", gpu) / row["us"] - 1)
    assert len(errors) == 30
    assert (round(min(errors), 2), round(max(errors), 2)) == (-0.06, 0.07)


def test_errors_of_mailboxes_are_those_of_the_rows():
    errors = []
    for row in fastest(is_by_mailboxes):
        problem, gemms = problem_of(row["case"]), (row["gemm_us"], 0.0)
        found = mailboxes.predict_us(problem, joined(25.0), moved_bytes(problem), 1.0, gemms)
        errors.append(found / row["us"] - 1)
    assert len(errors) == 16
    assert (round(min(errors), 2), round(max(errors), 2)) == (-0.06, 0.05)


def test_backward_by_mailboxes():
    """x first, then dx, beside dgrad and wgrad; a gather of sums beside wgrad."""
    us = partial(mailboxes.predict_us, hardware=joined(1.0), moved_bytes=2 * 10**6)
    problem = problem_of("gemm_rs:8192x8192x8192")
    moved = 1000.0 / mailboxes.RATE
    assert us(problem, share_of_x=0.5, gemms=(10.0, 20.0)) == 1.5 * moved + mailboxes.EDGE_US
    assert us(problem, share_of_x=0.5, gemms=(1e4, 2e4)) == 3e4 + mailboxes.EDGE_US
    gathers = problem_of("ag_gemm:8192x8192x8192")
    assert us(gathers, share_of_x=1.0, gemms=(1e4, 2e4)) == 3e4 + mailboxes.EDGE_US
    summed = problem_of("gemm_ar:8192x8192x8192")
    assert us(summed, share_of_x=1.0, gemms=(1e4, 2e4)) == 3e4 + mailboxes.EDGE_US
    assert us(summed, share_of_x=1.0, gemms=(0.0, 0.0)) == 2 * (moved + mailboxes.EDGE_US)


def test_ranks_of_several_nodes_are_joined_by_cards():
    nics = Nics(count=1, bandwidth_gbps=50.0, latency_us=5.0)
    cluster = replace(NODE, nics=nics)
    inside, between = hardware.of(cluster, 2), hardware.of(cluster, 4)
    assert (inside.peers, inside) == (True, hardware.of(cluster))
    assert (between.peers, between.mailboxes, between.nccl_gbps) == (False, False, 0.9 * 50.0)
    assert between.nccl_latency_us == inside.nccl_latency_us + 2 * 5.0
    many = hardware.of(replace(cluster, nics=replace(nics, count=99)), 4)
    assert many.nccl_gbps == 2 * 0.9 * 50.0


def test_an_arm_that_is_not_asked_for_forbids_nothing():
    """Userbuffers do not go through the host's memory."""
    host = {"cluster.link.kind": "host", "cluster.link.bandwidth_gbps": 25.0}
    name = "node/llama2-70b-8-layers_h200"
    with pytest.raises(ExperimentError, match="arm te overlaps only where GPUs reach"):
        predict(name, host)
    found = predict(name, host, ["megatron", "flux"])
    assert found.speedups("flux") > 1.1 > predict(name, {}).speedups("flux")


def test_a_step_over_nodes_is_longer():
    nodes = {
        "cluster.nodes": 2, "cluster.gpus_per_node": 2,
        "cluster.nics": {"count": 2, "bandwidth_gbps": 50.0, "latency_us": 5.0},
    }  # fmt: skip
    arms = ["megatron", "flux"]
    name = "node/llama2-70b-8-layers_h200"
    there, here = predict(name, nodes, arms), predict(name, {}, arms)
    for arm in arms:
        assert there.steps[arm].step_us > here.steps[arm].step_us
    assert there.speedups("flux") > here.speedups("flux")

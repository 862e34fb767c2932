"""Memory of the fullest GPU, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from step_costs import A100, GPT3, LLAMA, WORKLOAD, with_

from flux_megatron.launch import memory, stages
from flux_megatron.launch.workload import Parallel

SBH = 2048 * 2 * 12288  # elements of [s, b, h]


def test_gpt3_has_175_billion_parameters_and_llama_69():
    alone = Parallel(tp=1)
    gpt3 = replace(WORKLOAD, parallel=alone)
    h = 12288  # 12 h^2 weights, 9 h biases, 4 h norms; vocabulary padded to 393 x 128
    expected = 96 * (12 * h * h + 13 * h) + (50304 + 2048 + 2) * h
    assert sum(stages.parameters(gpt3, s) for s in stages.stages(gpt3)) == expected
    assert 174.5e9 < expected < 175e9
    llama = replace(gpt3, model=LLAMA)
    assert sum(stages.parameters(llama, s) for s in stages.stages(llama)) == 68_976_648_192


def test_the_first_stage_of_gpt3():
    """12 layers, the table, positions: 12 of 96 layers and 8 micro-batches in flight."""
    used = memory.estimate(WORKLOAD)
    layer = 12288 * (3 + 1 + 4 + 4) * 12288 // 8 + (3 + 4) * 12288 // 8 + (4 + 2) * 12288
    count = 12 * layer + 51200 // 8 * 12288 + 2048 * 12288
    assert used.stage == 0
    assert used.parameters == 2 * count
    assert used.gradients == 4 * count
    assert used.optimizer == 12 * count // 2  # shared by two replicas
    # 34 sbh in Korthikanti et al., less 2 sbh of masks; flash attention keeps 4 bytes a row
    assert used.activations == 8 * 12 * (32 * SBH // 8 + 4 * 2048 * 2 * 96 // 8)
    assert used.workspace == 2 * SBH
    assert used.total == sum(
        (used.parameters, used.gradients, used.optimizer, used.activations, used.workspace)
    )
    assert 50e9 < used.total < 60e9
    assert used.fits(A100)
    assert not used.fits(replace(A100, memory_gib=40.0))


def test_scores_are_kept_without_flash_attention_unless_they_are_recomputed():
    flash = memory.layer_activations(WORKLOAD)
    unfused = with_(WORKLOAD, "training", flash_attention=False)
    scores = 2 * 2 * 96 * 2048 * 2048 // 8  # 2 a s^2 b / t: the softmax; its mask is not there
    assert memory.layer_activations(unfused) == 32 * SBH // 8 + scores
    selective = with_(unfused, "training", recompute="selective")
    assert memory.layer_activations(selective) == 32 * SBH // 8 < flash


def test_full_recompute_keeps_inputs_and_one_layer():
    first = stages.stages(WORKLOAD)[0]
    full = with_(WORKLOAD, "training", recompute="full")
    one = memory.layer_activations(WORKLOAD)
    assert memory.activations(full, first) == 8 * 12 * 2 * SBH // 8 + one


def test_without_sequence_parallelism_the_rows_are_on_every_gpu():
    whole = with_(WORKLOAD, "parallel", sequence_parallel=False)
    # sbh (10 + 24 / t) in Korthikanti et al., less the masks
    assert memory.layer_activations(whole) - 4 * 2 * 2048 * 96 // 8 == SBH * 8 + 24 * SBH // 8


@pytest.mark.parametrize(("rank", "chunks"), [(0, 1), (5, 1), (7, 1), (0, 3), (7, 3)])
def test_in_flight(rank, chunks):
    """1F1B: p - rank; interleaved: that of Korthikanti et al., L (1 + (p - 1) / (p m)) layers."""
    interleaved = with_(WORKLOAD, "parallel", virtual_stages=chunks)
    expected = {(0, 1): 8, (5, 1): 3, (7, 1): 1, (0, 3): 2 * 7 + 2 * 8 + 1, (7, 3): 2 * 8 + 1}
    assert memory.in_flight(interleaved, rank) == expected[rank, chunks]
    factor = memory.in_flight(interleaved, 0) / (chunks * 8)
    assert chunks == 1 or factor == 1 + 7 / (8 * 3)


def test_never_more_in_flight_than_there_are():
    few = with_(WORKLOAD, "training", global_batch=2 * 2 * 3)
    assert [memory.in_flight(few, rank) for rank in range(8)] == [3] * 6 + [2, 1]


def test_the_last_stage_has_the_logits():
    last = stages.stages(WORKLOAD)[-1]
    without = replace(last, has_head=False)
    head = memory.activations(WORKLOAD, last) - memory.activations(WORKLOAD, without)
    assert head == 2 * 2 * SBH // 8 + 6 * 2048 * 2 * 51200 // 8


def test_a_tied_table_lies_on_both_ends_of_a_pipeline():
    tied, untied = (
        replace(WORKLOAD, model=replace(GPT3, tied_embeddings=tied)) for tied in (True, False)
    )
    for workload in (tied, untied):
        last = stages.stages(workload)[-1]
        plain = 12 * stages.layer_parameters(GPT3, workload.parallel) + 2 * 12288
        assert stages.parameters(workload, last) == plain + 51200 // 8 * 12288
    one = Parallel(tp=8)
    counts = [
        stages.parameters(w, stages.stages(w)[0])
        for w in (replace(tied, parallel=one), replace(untied, parallel=one))
    ]
    assert counts[1] - counts[0] == 51200 // 8 * 12288


@pytest.mark.parametrize(("arm", "buffers"), [("megatron", 1), ("te", 10), ("flux", 6)])
def test_what_the_arms_keep_for_themselves(arm, buffers):
    assert memory.workspace(replace(WORKLOAD, arm=arm)) == buffers * 2 * SBH
    assert memory.workspace(replace(WORKLOAD, arm=arm, parallel=Parallel(tp=1))) == 0


def test_float32_has_no_second_parameter():
    used = memory.of_stage(
        with_(WORKLOAD, "training", dtype="float32", distributed_optimizer=False),
        stages.stages(WORKLOAD)[3],
    )
    assert used.parameters == used.gradients == used.optimizer // 2


def test_ranks_of_a_cpu_machine_share_its_memory():
    used = memory.Memory(0, *[2**28] * 5)
    machine = replace(A100, gpu="cpu", memory_gib=10.0)
    assert used.fits(machine)
    assert not used.fits(replace(machine, memory_gib=9.9))


def test_layers_that_cannot_be_shared_out():
    uneven = with_(WORKLOAD, "parallel", virtual_stages=5)
    with pytest.raises(ValueError, match="96 layers cannot be shared out to 8 pipeline stages of"):
        memory.estimate(uneven)

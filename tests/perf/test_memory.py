"""Memory of the fullest GPU, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from step_costs import A100, GPT3, LLAMA, WORKLOAD, with_

from flux_megatron.launch import memory
from flux_megatron.launch.workload import Parallel

SBH = 2048 * 2 * 12288  # elements of [s, b, h]


def test_gpt3_has_175_billion_parameters_and_llama_69():
    alone = Parallel(tp=1)
    gpt3 = replace(WORKLOAD, parallel=alone)
    h = 12288  # 12 h^2 weights, 9 h biases, 4 h norms; vocabulary padded to 393 x 128
    expected = 96 * (12 * h * h + 13 * h) + (50304 + 2048 + 2) * h
    assert sum(memory.parameters(gpt3, s) for s in memory.stages(gpt3)) == expected
    assert 174.5e9 < expected < 175e9
    llama = replace(gpt3, model=LLAMA)
    assert sum(memory.parameters(llama, s) for s in memory.stages(llama)) == 68_976_648_192


def test_the_first_stage_of_gpt3():
    """12 layers, the table, positions: 12 of 96 layers and 8 micro-batches in flight."""
    first = memory.stages(WORKLOAD)[0]
    layer = 12288 * (3 + 1 + 4 + 4) * 12288 // 8 + (3 + 4) * 12288 // 8 + (4 + 2) * 12288
    count = 12 * layer + 51200 // 8 * 12288 + 2048 * 12288
    assert memory.parameters(WORKLOAD, first) == count
    assert memory.updated(WORKLOAD, first) == count // 2  # shared by two replicas
    # 34 sbh in Korthikanti et al., less 2 sbh of masks; flash attention keeps 4 bytes a row
    kept = 8 * 12 * (32 * SBH // 8 + 4 * 2048 * 2 * 96 // 8)
    assert memory.activations(WORKLOAD, first) == kept
    # bf16 parameters and fp32 gradients, 12 bytes of the optimizer, stock's gathered buffer
    assert memory.needed(WORKLOAD) == (2 + 4) * count + 12 * count // 2 + kept + 2 * SBH
    assert 50e9 < memory.needed(WORKLOAD) < 60e9
    gib = memory.needed(WORKLOAD) / 2**30
    for beside, fits in ((3.0, True), (2.9, False)):
        cluster = replace(A100, memory_gib=gib + beside)
        assert memory.fits(replace(WORKLOAD, cluster=cluster)) is fits


def test_scores_are_kept_without_flash_attention_unless_they_are_recomputed():
    flash = memory.layer_activations(WORKLOAD)
    unfused = with_(WORKLOAD, "training", flash_attention=False)
    scores = 2 * 2 * 96 * 2048 * 2048 // 8  # 2 a s^2 b / t: the softmax; its mask is not there
    assert memory.layer_activations(unfused) == 32 * SBH // 8 + scores
    selective = with_(unfused, "training", recompute="selective")
    assert memory.layer_activations(selective) == 32 * SBH // 8 < flash


def test_full_recompute_keeps_inputs_and_one_layer():
    first = memory.stages(WORKLOAD)[0]
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
    last = memory.stages(WORKLOAD)[-1]
    without = replace(last, has_head=False)
    head = memory.activations(WORKLOAD, last) - memory.activations(WORKLOAD, without)
    assert head == 2 * 2 * SBH // 8 + 6 * 2048 * 2 * 51200 // 8


def test_a_tied_table_lies_on_both_ends_of_a_pipeline():
    tied, untied = (
        replace(WORKLOAD, model=replace(GPT3, tied_embeddings=tied)) for tied in (True, False)
    )
    for workload in (tied, untied):
        last = memory.stages(workload)[-1]
        plain = 12 * memory.layer_parameters(GPT3, workload.parallel) + 2 * 12288
        assert memory.parameters(workload, last) == plain + 51200 // 8 * 12288
    one = Parallel(tp=8)
    counts = [
        memory.parameters(w, memory.stages(w)[0])
        for w in (replace(tied, parallel=one), replace(untied, parallel=one))
    ]
    assert counts[1] - counts[0] == 51200 // 8 * 12288


@pytest.mark.parametrize(("arm", "buffers"), [("megatron", 1), ("te", 10), ("flux", 4)])
def test_what_the_arms_keep_for_themselves(arm, buffers):
    assert memory.workspace(replace(WORKLOAD, arm=arm)) == buffers * 2 * SBH
    assert memory.workspace(replace(WORKLOAD, arm=arm, parallel=Parallel(tp=1))) == 0


def test_float32_has_no_second_parameter():
    """4 bytes of it, 4 of its gradient, 8 of Adam's moments."""
    alone = with_(WORKLOAD, "training", dtype="float32", distributed_optimizer=False)
    stage = memory.stages(alone)[3]
    rest = memory.activations(alone, stage) + memory.workspace(alone)
    assert memory.of_stage(alone, stage) - rest == 16 * memory.parameters(alone, stage)


def test_ranks_of_a_cpu_machine_share_its_memory():
    gib = memory.needed(WORKLOAD) * A100.gpus_per_node / 2**30
    machine = replace(A100, gpu="cpu", memory_gib=gib)
    assert memory.fits(replace(WORKLOAD, cluster=machine))
    assert not memory.fits(replace(WORKLOAD, cluster=replace(machine, memory_gib=0.999 * gib)))


def test_layers_that_cannot_be_shared_out():
    uneven = with_(WORKLOAD, "parallel", virtual_stages=5)
    with pytest.raises(ValueError, match="96 layers cannot be shared out to 8 pipeline stages of"):
        memory.needed(uneven)

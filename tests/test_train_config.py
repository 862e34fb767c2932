"""What a run of `flux-megatron train` is: its configuration, its ranks, its folder."""

import pytest
from train_words import DEMO, load

from flux_megatron import settings
from flux_megatron.errors import BadInput
from flux_megatron.lab.train import config as configs
from flux_megatron.lab.train import ranks, run_folder
from flux_megatron.overlap.report import Report


@pytest.mark.parametrize("file", sorted(DEMO.parent.glob("*.yaml")), ids=lambda file: file.name)
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_shipped_configs_load_at_every_tensor_parallel_size(file, tp):
    config = configs.load(file, {"parallel.tp": tp})
    assert config.eligible_calls() == 8 * config.model.num_layers + 2
    assert configs.load(file.with_suffix("").relative_to(file.parent), {}) == configs.load(file, {})


def test_sequence_length_is_free_without_sequence_parallelism():
    uneven = {"model__seq_length": 30, "parallel__tp": 4}
    config = load(**uneven, parallel__sequence_parallel=False)
    assert config.eligible_calls() == 4 * config.model.num_layers + 1, "half of the collectives"
    with pytest.raises(BadInput, match=r"model\.seq_length=30 must be divisible by parallel\.tp=4"):
        load(**uneven)


def test_a_sequential_plan_is_a_reason_where_plans_are_chosen():
    calls = {("gemm_rs", "fused"): 6, ("gemm_rs", "sequential"): 5}
    found = Report(calls, {("gemm_rs", "why"): 2}, 0)
    for strategy in settings.STRATEGIES:
        silent = 2 if strategy in ("auto", "sequential") else 5
        assert run_folder.counts(load(strategy=strategy), found, 13)["silent"] == silent
    assert run_folder.counts(load(layers="stock"), found, 13)["eligible"] == 0


def test_global_batch_is_shared_out():
    config = load(train__global_batch=16, train__micro_batch=4)
    assert config.microbatches(4) == 2
    for given in (3, 6):
        with pytest.raises(BadInput, match=rf"{given} ranks, parallel\.tp=2, .*=16 given"):
            config.microbatches(given)


@pytest.mark.parametrize(
    ("gpus", "overrides", "expected"),
    [
        (0, {}, (2, False)), (1, {}, (2, False)),  # too few GPUs for tp: the CPU serves
        (4, {}, (4, True)), (4, {"parallel__world_size": 2}, (2, True)),
        (4, {"parallel__device": "cpu"}, (2, False)), (0, {"parallel__world_size": 4}, (4, False)),
    ],
)  # fmt: skip
def test_placement(monkeypatch, gpus, overrides, expected):
    monkeypatch.setattr(ranks, "gpu_count", lambda: gpus)
    assert ranks.placement(load(**{"parallel__device": "auto"} | overrides)) == expected


def test_metrics_drop_a_torn_line_and_rows_after_the_checkpoint(tmp_path):
    for step in (1, 2, 3):
        run_folder.append_metrics(tmp_path, {"step": step})
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 4')
    run_folder.keep_metrics(tmp_path, step=2)
    assert [row["step"] for row in run_folder.metrics(tmp_path)] == [1, 2]


def test_a_run_that_has_done_no_step_leaves_its_folder_free(tmp_path):
    (tmp_path / "config.json").write_text(load().model_dump_json())
    (tmp_path / "logs").mkdir()
    run_folder.check(load(), tmp_path, resume=False)
    run_folder.append_metrics(tmp_path, {"step": 1})
    with pytest.raises(BadInput, match="is not empty"):
        run_folder.check(load(), tmp_path, resume=False)
    run_folder.check(load(train__steps=7, parallel__tp=4), tmp_path, resume=True)

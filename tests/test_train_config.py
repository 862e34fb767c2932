"""The YAML schema of `flux-megatron train`.

What is refused, and that the message names file, key and rule.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pydantic", reason="needs the extra `train`")

from flux_megatron import config_files, settings
from flux_megatron.lab.train import config as configs
from flux_megatron.lab.train import launcher, run_folder
from flux_megatron.lab.train.config import ConfigError

CONFIGS = Path(__file__).parent.parent / "configs" / "train"
DEMO = CONFIGS / "demo.yaml"


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.name)
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_shipped_configs_load_at_every_tensor_parallel_size(file, tp):
    config = configs.load(file, {"parallel.tp": tp})
    assert config.padded_vocab == 320, "the vocabulary, and with it the loss, must not depend on tp"
    assert config.eligible_calls(1, 1) == 8 * config.model.num_layers + 2


def test_missing_key_names_file_and_key(tmp_path):
    file = tmp_path / "half.yaml"
    file.write_text("train: {steps: 1, micro_batch: 1, global_batch: 1, lr: 0.1}\n")
    with pytest.raises(ConfigError, match=r"half\.yaml: model: Field required"):
        configs.load(file, {})


@pytest.mark.parametrize(
    ("overrides", "rule"),
    [
        ({"model.heads": 6, "model.hidden": 96, "parallel.tp": 4}, "heads=6 must be divisible by"),
        ({"model.hidden": 100}, "model.hidden=100 must be divisible by model.heads=8"),
        ({"model.ffn": 130, "parallel.tp": 4}, "model.ffn=130 must be divisible by parallel.tp=4"),
        ({"model.seq_length": 126, "parallel.tp": 4}, "model.seq_length=126 must be divisible by"),
    ],
)  # fmt: skip
def test_rules(overrides, rule):
    with pytest.raises(ConfigError) as caught:
        configs.load(DEMO, overrides)
    assert rule in str(caught.value)


def test_sequence_length_is_free_without_sequence_parallelism():
    overrides = {"model.seq_length": 126, "parallel.tp": 4, "parallel.sequence_parallel": False}
    config = configs.load(DEMO, overrides)
    assert config.eligible_calls(1, 1) == 4 * config.model.num_layers + 1, "half of the collectives"


def test_a_strategy_of_a_call_is_one_of_a_run():
    for name in settings.STRATEGIES:
        assert configs.load(DEMO, {"strategy": name}).strategy == name
    with pytest.raises(
        ConfigError, match="'pipelined', 'low_latency', 'signalled' or 'sequential'"
    ):
        configs.load(DEMO, {"strategy": "magic"})


@pytest.mark.parametrize(
    ("strategy", "silent"), [("auto", 2), ("sequential", 2), ("hopper", 5), ("fused", 5)]
)
def test_a_sequential_plan_is_a_reason_where_plans_are_chosen(strategy, silent):
    counts = {"overlapped": 6, "fallbacks": {"gemm_rs: why": 2}, "chosen_sequential": 3}
    assert configs.load(DEMO, {"strategy": strategy}).silent_calls(13, counts) == silent


def test_padded_vocabulary_divides_by_odd_tensor_parallel_sizes():
    overrides = {"parallel.tp": 3, "model.heads": 3, "model.hidden": 96, "model.seq_length": 96}
    assert configs.load(DEMO, overrides).padded_vocab == 384


def test_overrides_are_read_as_yaml():
    overrides = dict(
        map(configs.parse_override, ["train.lr=1e-2", "data.path=null", "train.clip=0"])
    )
    config = configs.load(DEMO, overrides)
    assert (config.train.lr, config.data.path, config.train.clip) == (0.01, None, 0.0)


def test_files_are_strict_yaml(tmp_path):
    """Of PyYAML alone 1e-3 would be a text, and the last of two values would count."""
    assert config_files.parse_override("train.lr=1e-3", example="") == ("train.lr", 0.001)
    file = tmp_path / "twice.yaml"
    file.write_text(DEMO.read_text() + "\ntrain: {steps: 1}\n")
    with pytest.raises(ConfigError, match=r"twice\.yaml: not YAML: given twice: train"):
        configs.load(file, {})


def test_global_batch_is_shared_out():
    config = configs.load(DEMO, {"train.global_batch": 16})
    assert config.microbatches(data_parallel=2) == 2
    with pytest.raises(ConfigError, match=r"global_batch=16 is not a multiple .* = 12"):
        config.microbatches(data_parallel=3)


@pytest.mark.parametrize(
    ("gpus", "overrides", "expected"),
    [
        (0, {}, (2, False)),
        (1, {}, (2, False)),  # too few GPUs for tp: the CPU serves
        (4, {}, (4, True)),
        (4, {"parallel.world_size": 2}, (2, True)),
        (4, {"parallel.device": "cpu"}, (2, False)),
        (0, {"parallel.world_size": 4}, (4, False)),
    ],
)
def test_placement(monkeypatch, gpus, overrides, expected):
    monkeypatch.setattr(launcher, "gpu_count", lambda: gpus)
    assert launcher.placement(configs.load(DEMO, overrides)) == expected


def test_placement_refuses(monkeypatch):
    monkeypatch.setattr(launcher, "gpu_count", lambda: 3)
    with pytest.raises(ConfigError, match=r"3 GPUs are not a multiple of parallel\.tp=2"):
        launcher.placement(configs.load(DEMO, {}))
    with pytest.raises(ConfigError, match="4 ranks need as many GPUs, found 3"):
        launcher.placement(configs.load(DEMO, {"parallel.tp": 4, "parallel.device": "cuda"}))


def test_a_used_folder_is_refused_and_other_settings_do_not_resume(tmp_path):
    config, out = configs.load(DEMO, {"train.lr": 0.01}), tmp_path / "run"
    with run_folder.claimed(config, out, resume=False):
        assert run_folder.recorded_config(out) == config
    with pytest.raises(ConfigError, match="is not empty"):
        claim(config, out, resume=False)
    claim(configs.load(DEMO, {"train.lr": 0.01, "train.steps": 7}), out, resume=True)
    with pytest.raises(ConfigError, match=r"train\.lr: 0\.01 -> 0\.1"):
        claim(configs.load(DEMO, {"train.lr": 0.1}), out, resume=True)


def test_a_folder_is_one_runs_alone(tmp_path):
    config, out = configs.load(DEMO, {}), tmp_path / "run"
    with run_folder.claimed(config, out, resume=False):  # noqa: SIM117, what is inside raises
        with pytest.raises(ConfigError, match="another run is writing"):
            claim(config, out, resume=True)
    claim(config, out, resume=True)


def claim(config, out, resume):
    with run_folder.claimed(config, out, resume):
        pass


def test_metrics_drop_a_torn_line_and_rows_after_the_checkpoint(tmp_path):
    for step in (1, 2, 3):
        run_folder.append_metrics(tmp_path, {"step": step})
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 4')
    run_folder.keep_metrics(tmp_path, step=2)
    assert [row["step"] for row in run_folder.metrics(tmp_path)] == [1, 2]


def test_a_row_that_is_none_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"st\xff\x00\n{"step": 3}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: line 2 is no row"):
        run_folder.keep_metrics(tmp_path, step=3)


@pytest.mark.parametrize("text", ["", "step_7\n", "step_4.partial\n"])
def test_a_torn_pointer_names_the_checkpoints_there_are(tmp_path, text):
    for name in ("step_2", "step_10", "step_4.partial"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints" / "latest").write_text(text)
    with pytest.raises(ConfigError, match=r"expected one of \['step_2', 'step_10'\]"):
        run_folder.latest(tmp_path)


def test_a_bad_bound_is_refused_before_any_rank_starts(monkeypatch):
    monkeypatch.setenv("FLUX_MEGATRON_TIMEOUT_S", "soon")
    settings.get.cache_clear()
    try:
        with pytest.raises(ConfigError, match="FLUX_MEGATRON_TIMEOUT_S='soon'"):
            launcher.wait_bound_s()
    finally:
        settings.get.cache_clear()

"""Experiments that are refused: each rule, by file, key and text."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from flux_megatron.launch.errors import ExperimentError
from flux_megatron.launch.experiment import load

CONFIGS = Path(__file__).parents[2] / "configs"
PAPER = CONFIGS / "experiments/paper/gpt3-175b_a100-pcie.yaml"
NODE = CONFIGS / "experiments/node/llama2-70b-8-layers_h200.yaml"
CPU = CONFIGS / "experiments/cpu/tiny.yaml"


def written(folder: Path, name: str, content: dict) -> Path:
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def delta(folder: Path, base: Path, changes: dict, **more) -> Path:
    """An experiment that differs from `base` by dotted `changes`, each of them explained."""
    why = {key: "for a test" for key in changes}
    return written(folder, "delta", {"base": str(base), **changes, "assumed": why, **more})


def refused(file: Path) -> list[tuple[str, str, str]]:
    with pytest.raises(ExperimentError) as caught:
        load(str(file))
    assert all(str(error) in str(caught.value) for error in caught.value.errors)
    return [(c.file, c.key, c.rule) for c in caught.value.errors]


# base, what is changed, the key that must be named, text of the rule
RULES = {
    "world size": (PAPER, {"parallel.dp": 4}, "parallel", "256 GPUs, the cluster has 16 x 8 = 128"),
    "heads": (
        PAPER,
        {"model.heads": 100, "model.kv_heads": 100},
        "model.heads",
        "100 is not divisible by parallel.tp, 8",
    ),
    "hidden": (PAPER, {"model.hidden": 12289}, "model.hidden", "by model.heads, 96"),
    "kv_heads": (
        NODE,
        {"model.kv_heads": 2},
        "model.kv_heads",
        "2 is not divisible by parallel.tp",
    ),
    "groups": (NODE, {"model.kv_heads": 12}, "model.heads", "by model.kv_heads, 12"),
    "ffn": (NODE, {"model.ffn": 28674}, "model.ffn", "28674 is not divisible by parallel.tp, 4"),
    "sequence": (NODE, {"model.seq_length": 4098}, "model.seq_length", "4098 is not divisible"),
    "layers": (
        PAPER,
        {"model.layers": 92},
        "model.layers",
        "parallel.pp x parallel.virtual_stages",
    ),
    "virtual stages": (PAPER, {"parallel.virtual_stages": 5}, "model.layers", "virtual_stages, 40"),
    "interleaved micro-batches": (
        PAPER,
        {"parallel.virtual_stages": 2, "training.global_batch": 48},
        "training.global_batch",
        "interleaved",
    ),
    "interleaving needs stages": (
        NODE,
        {"parallel.virtual_stages": 2},
        "parallel.virtual_stages",
        "parallel.pp above 1",
    ),
    "global batch": (
        PAPER,
        {"training.global_batch": 1535},
        "training.global_batch",
        "1535 is not divisible by training.micro_batch x parallel.dp, 4",
    ),
    "warm-up": (PAPER, {"training.warmup_steps": 30}, "training.warmup_steps", "none is left"),
    "sign": (PAPER, {"training.micro_batch": 0}, "training.micro_batch", "greater than 0, 0 given"),
    "sign, from 0": (
        PAPER,
        {"training.seed": -1},
        "training.seed",
        "greater than or equal to 0, -1 given",
    ),
    "too large": (PAPER, {"training.steps": 2**31}, "training.steps", "equal to 2147483647, 2147"),
    "tp over nodes": (
        PAPER,
        {"parallel.tp": 16, "parallel.dp": 1},
        "parallel.tp",
        "arm flux would run without overlap",
    ),
    "te over nodes": (PAPER, {"parallel.tp": 16, "parallel.dp": 1}, "parallel.tp", "arm te"),
    "uneven nodes": (
        CPU,
        {"cluster.gpus_per_node": 3, "cluster.nodes": 4, "parallel.dp": 6},
        "parallel.tp",
        "one must divide the other",
    ),
    "no sequence parallelism": (
        NODE,
        {"parallel.sequence_parallel": False},
        "parallel.sequence_parallel",
        "arm te has nothing to overlap",
    ),
    "no cards": (PAPER, {"cluster.nics": None}, "cluster.nics", "16 nodes need them"),
    "memory": (
        PAPER,
        {"training.micro_batch": 4, "training.flash_attention": False},
        "training",
        "GiB on its fullest GPU",
    ),
    "param gather": (
        PAPER,
        {"training.overlap_param_gather": True},
        "training.overlap_param_gather",
        "needs training.distributed_optimizer and training.overlap_grad_reduce",
    ),
    "release": (PAPER, {"megatron_lm": "core_v0.16"}, "megatron_lm", "core_v0.16.1"),
    "argument": (PAPER, {"arguments": ["--use-flash"]}, "arguments", "unrecognized arguments"),
    "argument of an arm": (
        PAPER,
        {"arms.te.arguments": ["--use-flash"]},
        "arms.te.arguments",
        "unrecognized arguments",
    ),
    "arguments of our loop": (CPU, {"arguments": ["--bf16"]}, "arguments", "takes none"),
    "te on CPU": (CPU, {"arms.te": {}}, "arms.te", "TransformerEngine needs GPUs"),
    "te in our loop": (CPU, {"arms.te": {}}, "arms.te", "program train has no such arm"),
    "groups in our loop": (CPU, {"model.kv_heads": 2}, "model.kv_heads", "program train"),
    "tokens in our loop": (CPU, {"model.vocab": 50257}, "model.vocab", "reads bytes: 257"),
    "pipeline in our loop": (
        CPU,
        {"parallel.pp": 2, "parallel.dp": 1},
        "parallel.pp",
        "has no pipeline",
    ),
    "recompute in our loop": (CPU, {"training.recompute": "full"}, "training.recompute", "none"),
    "optimizer in our loop": (
        CPU,
        {"training.distributed_optimizer": True},
        "training.distributed_optimizer",
        "has none",
    ),
    "arm's own": (
        PAPER,
        {"arms.flux.training.micro_batch": 5},
        "training.global_batch",
        "by training.micro_batch x parallel.dp, 10",
    ),
    "typo": (PAPER, {"training.mirco_batch": 2}, "training.mirco_batch", "'micro_batch'"),
    "typo at the top": (PAPER, {"trainning": 2}, "trainning", "did you mean 'training'?"),
    "typo, nested": (PAPER, {"cluster.nics.cuont": 2}, "cluster.nics.cuont", "'count'"),
    "typo of an arm": (PAPER, {"arms.fluks": {}}, "arms.fluks", "'flux'"),
    "typo in an arm": (PAPER, {"arms.flux.trainin.lr": 1.0}, "arms.flux.trainin", "'training'"),
    "unlike all": (PAPER, {"model.xyzzy": 2}, "model.xyzzy", "known: ['ffn', 'heads'"),
    "text for a number": (
        PAPER,
        {"training.micro_batch": "2"},
        "training.micro_batch",
        "'2' given",
    ),
    "text in an arm": (
        PAPER,
        {"arms.flux.training.lr": "x"},
        "arms.flux.training.lr",
        "valid number, 'x' given",
    ),
    "mapping for a number": (PAPER, {"training.lr.x": 1}, "training.lr", "valid number"),
    "mapping in an arm for a number": (
        PAPER,
        {"arms.flux.parallel.tp.x": 1},
        "arms.flux.parallel.tp",
        "valid integer",
    ),
    "number for a mapping": (PAPER, {"cluster.link": 1}, "cluster.link", "1 given"),
    "truth for a number": (PAPER, {"parallel.tp": True}, "parallel.tp", "True given"),
    "not a number": (PAPER, {"training.lr": float("nan")}, "training.lr", "nan given"),
    "unlisted choice": (PAPER, {"training.recompute": "all"}, "training.recompute", "'selective'"),
    "scalar for a section": (PAPER, {"training": 5}, "training", "should be a mapping, 5 given"),
    "scalar for an arm": (PAPER, {"arms.te": None}, "arms.te", "should be a mapping, None given"),
    "texts": (PAPER, {"arms.te.arguments": [1]}, "arms.te.arguments", "valid string, 1 given"),
    "model's name": (PAPER, {"model": "gpt4"}, "model", "'gpt4' given, one of ['gpt3-175b'"),
}


@pytest.mark.parametrize("case", RULES)
def test_a_broken_rule_is_named(case, tmp_path):
    base, changes, key, text = RULES[case]
    file = delta(tmp_path, base, changes)
    found = [(where, rule) for where, k, rule in refused(file) if k == key and text in rule]
    assert found
    assert found[0][0] == str(file) or key not in changes


def test_the_file_that_set_the_key_is_named(tmp_path):
    model = yaml.safe_load((CONFIGS / "models/gpt3-175b.yaml").read_text())
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(model | {"ffn": 49153}))
    file = written(tmp_path, "experiment", {"base": str(PAPER), "model": "mine.yaml"})
    ((where, key, rule),) = refused(file)
    assert (where, key) == (str(tmp_path / "mine.yaml"), "model.ffn")
    assert rule == "49153 is not divisible by parallel.tp, 8"


def test_all_that_is_wrong_is_reported_at_once(tmp_path):
    changes = {"parallel.dp": 3, "model.ffn": 1, "training.stepps": 2, "training.steps": 5}
    found = refused(delta(tmp_path, PAPER, changes, sweep={"training.lr": []}))
    assert {key for _, key, _ in found} == {
        "parallel", "model.ffn", "training.stepps", "training.warmup_steps", "sweep.training.lr",
    }  # fmt: skip


def test_too_much_memory_is_reported_of_arms_that_keep_all_other_rules(tmp_path):
    changes = {"training.micro_batch": 4, "training.flash_attention": False}
    assert {key for _, key, _ in refused(delta(tmp_path, PAPER, changes))} == {"training"}
    found = refused(delta(tmp_path, PAPER, changes | {"training.global_batch": 3}))
    assert {key for _, key, _ in found} == {"training.global_batch"}


def test_tp_over_nodes_can_be_meant(tmp_path):
    over = {"parallel.tp": 4, "parallel.dp": 1}
    assert "tp_across_nodes" in refused(delta(tmp_path, CPU, over))[0][2]
    meant = load(str(delta(tmp_path, CPU, over | {"tp_across_nodes": True})))
    assert meant.arms["flux"].parallel.tp == 4


def test_without_sequence_parallelism_flux_runs(tmp_path):
    made = load(str(delta(tmp_path, CPU, {"parallel.sequence_parallel": False})))
    assert not made.arms["flux"].parallel.sequence_parallel

"""Experiments: what files give, each rule that refuses one by its key, and all that we ship."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import yaml
from without_torch import without_torch

from flux_megatron.config_files import flat, overrides
from flux_megatron.launch.errors import ExperimentError, LaunchError
from flux_megatron.launch.experiment import load, names

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
PAPER = str(CONFIGS / "experiments/paper/gpt3-175b_a100-pcie.yaml")
NODE = str(CONFIGS / "experiments/node/llama2-70b-8-layers_h200.yaml")
CPU = str(CONFIGS / "experiments/cpu/tiny.yaml")
ALL = names()


def put(folder: Path, name: str, content: str | dict) -> str:
    file = folder / f"{name}.yaml"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return str(file)


def refused(file: str, overrides: dict | None = None) -> dict[str, str]:
    """The rules by their keys; the message has them all."""
    with pytest.raises(ExperimentError) as caught:
        load(file, overrides)
    assert all(f"{file}: {key}: {rule}" in str(caught.value) for key, rule in caught.value.rules)
    found: dict[str, str] = {}
    for key, rule in caught.value.rules:
        found[key] = f"{found.get(key, '')}\n{rule}"
    return found


# --- rules: base, what is changed, the key that must be named, text of the rule

RULES = [
    (PAPER, {"parallel.dp": 4}, "parallel", "256 GPUs, the cluster has 16 x 8 = 128"),
    (PAPER, {"model.heads": 100, "model.kv_heads": 100}, "model.heads", "100 is not divisible by"),
    (PAPER, {"model.hidden": 12289}, "model.hidden", "by model.heads, 96"),
    (NODE, {"model.kv_heads": 2}, "model.kv_heads", "2 is not divisible by parallel.tp"),
    (NODE, {"model.kv_heads": 12}, "model.heads", "by model.kv_heads, 12"),
    (NODE, {"model.ffn": 28674}, "model.ffn", "28674 is not divisible by parallel.tp, 4"),
    (NODE, {"model.seq_length": 4098}, "model.seq_length", "4098 is not divisible"),
    (PAPER, {"model.layers": 92}, "model.layers", "parallel.pp x parallel.virtual_stages"),
    (PAPER, {"parallel.virtual_stages": 5}, "model.layers", "virtual_stages, 40"),
    (PAPER, {"parallel.virtual_stages": 2, "training.global_batch": 48}, "training.global_batch",
     "48 is not divisible by training.micro_batch x parallel.dp x parallel.pp, 32"),
    (NODE, {"parallel.virtual_stages": 2}, "parallel.virtual_stages", "parallel.pp above 1"),
    (PAPER, {"training.global_batch": 1535}, "training.global_batch",
     "1535 is not divisible by training.micro_batch x parallel.dp, 4"),
    (PAPER, {"arms.flux.training.micro_batch": 5}, "training.global_batch", "parallel.dp, 10"),
    (PAPER, {"training.warmup_steps": 30}, "training.warmup_steps", "none is left"),
    (PAPER, {"training.seed": -1}, "training.seed", "greater than or equal to 0, -1 given"),
    (PAPER, {"parallel.tp": 16, "parallel.dp": 1}, "parallel.tp", "8: arm te overlaps only"),
    (CPU, {"cluster.gpus_per_node": 3, "cluster.nodes": 4, "parallel.dp": 6}, "parallel.tp",
     "one must divide the other"),
    (NODE, {"parallel.sequence_parallel": False}, "parallel.sequence_parallel",
     "false given, true expected: arm te has nothing to overlap"),
    (PAPER, {"cluster.nics": None}, "cluster.nics", "16 nodes need them"),
    (PAPER, {"training.micro_batch": 4, "training.flash_attention": False}, "training",
     "GiB on its fullest GPU, too much for cluster.memory_gib, 80"),
    (PAPER, {"training.overlap_param_gather": True}, "training.overlap_param_gather",
     "needs training.distributed_optimizer and training.overlap_grad_reduce"),
    (PAPER, {"megatron_lm": "core_v0.16"}, "megatron_lm", "'core_v0.16' given, one of ['core_v0"),
    (PAPER, {"arguments": ["--use-flash"]}, "arguments", "unrecognized arguments: --use-flash"),
    (PAPER, {"arms.te.arguments": ["--num-layers", "x"]}, "arms.te.arguments", "invalid int"),
    (CPU, {"arguments": ["--bf16"]}, "arguments", "['--bf16'] given, program train takes none"),
    (CPU, {"arms.te": {}}, "arms.te", "TransformerEngine needs GPUs"),
    (CPU, {"arms.te": {}}, "arms.te", "program train has no such arm"),
    (CPU, {"model.kv_heads": 2}, "model.kv_heads", "2 given, program train has nothing but 4"),
    (CPU, {"model.vocab": 50257}, "model.vocab", "50257 given, program train has nothing but 257"),
    (CPU, {"parallel.pp": 2, "parallel.dp": 1}, "parallel.pp", "2 given, program train"),
    (CPU, {"training.recompute": "full"}, "training.recompute", "full given, program train"),
    (CPU, {"training.distributed_optimizer": True}, "training.distributed_optimizer", "True given"),
    (CPU, {"training.overlap_grad_reduce": True}, "training.overlap_grad_reduce", "True given"),
    (PAPER, {"training.mirco_batch": 2}, "training.mirco_batch", "did you mean 'micro_batch'?"),
    (PAPER, {"trainning": 2}, "trainning", "did you mean 'training'?"),
    (PAPER, {"cluster.nics.cuont": 2}, "cluster.nics.cuont", "'count'"),
    (PAPER, {"arms.fluks": {}}, "arms.fluks", "'megatron', 'te' or 'flux', 'fluks' given"),
    (PAPER, {"arms.flux.trainin.lr": 1.0}, "arms.flux.trainin", "'training'"),
    (PAPER, {"arms.flux.training.lrr": 1.0}, "arms.flux.training.lrr", "'lr'"),
    (PAPER, {"model.xyzzy": 2}, "model.xyzzy", "known: ['experts', 'ffn', 'heads'"),
    (PAPER, {"training.micro_batch": "2"}, "training.micro_batch", "'2' given"),
    (PAPER, {"arms.flux.training.lr": "x"}, "arms.flux.training.lr", "valid number, 'x' given"),
    (PAPER, {"training.lr.x": 1}, "training.lr", "valid number"),
    (PAPER, {"arms.flux.parallel.tp.x": 1}, "arms.flux.parallel.tp", "valid integer"),
    (PAPER, {"cluster.link": 1}, "cluster.link", "1 given"),
    (PAPER, {"parallel.tp": True}, "parallel.tp", "True given"),
    (PAPER, {"training.lr": float("nan")}, "training.lr", "nan given"),
    (PAPER, {"training.recompute": "all"}, "training.recompute", "'selective' or 'full', 'all'"),
    (PAPER, {"training": 5}, "training", "should be a mapping, 5 given"),
    (PAPER, {"arms.te": None}, "arms.te", "should be a mapping, None given"),
    (PAPER, {"arms.te.arguments": [1]}, "arms.te.arguments.0", "valid string, 1 given"),
    (PAPER, {"model": "gpt4"}, "model", "'gpt4' given, one of ['gpt-oss"),
    (PAPER, {"program": "pretrain"}, "program", "'pretrain_gpt' or 'train', 'pretrain' given"),
]  # fmt: skip


@pytest.mark.parametrize(("base", "changes", "key", "text"), RULES)
def test_a_broken_rule_is_named(base, changes, key, text, tmp_path):
    why = dict.fromkeys(changes, "for a test")
    file = put(tmp_path, "delta", {"base": base, **changes, "assumed": why})
    assert text in refused(file).get(key, "")


def test_all_that_is_wrong_is_reported_at_once_but_memory_of_sound_arms_alone(tmp_path):
    changes = {
        "parallel.dp": 3, "model.ffn": 1, "training.stepps": 2, "training.steps": 5,
        "training.micro_batch": 7,
    }  # fmt: skip
    more = {"assumed": dict.fromkeys(changes, "test"), "sweep": {"training.lr": []}}
    found = refused(put(tmp_path, "delta", {"base": PAPER, **changes, **more}))
    assert found.keys() == {
        "parallel", "model.ffn", "training.stepps", "training.warmup_steps",
        "training.global_batch", "sweep.training.lr",
    }  # fmt: skip


# --- files: text upon a base, and what is said of it

FILES = {
    "a list": ("[1]", "a mapping expected, list given"),
    "twice": ("program: train\nprogram: train", "given twice: program"),
    "twice, nested": ("training: {lr: 1, lr: 2}", "given twice: lr"),
    "no path": (f"base: [{CPU}]", "base: "),
    "no base": ("base: elsewhere.yaml", "elsewhere.yaml: No such file"),
    "a cycle": ("base: it.yaml", "base: inherits from itself: "),
    "a longer cycle": ("base: other.yaml", "base: inherits from itself: "),
    "nothing in it": ("{}", "program: missing"),
    "no mapping": (f"base: {CPU}\nparallel: 3", "parallel: Input should be a mapping"),
    "no arms": (f"base: {CPU}\narms: []", "arms: Input should be a mapping"),
    "no model": (f"base: {CPU}\nmodel: mine.yaml", "model.hidden: missing"),
    "a default": (f"base: {CPU}\nmodel: most.yaml", "model.swiglu: missing"),
    "a new value": (f"base: {PAPER}\ntraining.steps: 50", "training.steps: neither stated nor"),
    "a stated one": (f"base: {PAPER}\nparallel: {{pp: 4, dp: 4}}", "parallel.pp: neither stated"),
    "an arm's": (f"base: {PAPER}\narms.te.training.lr: 1.0", "arms.te.training.lr: neither stated"),
    "arguments": (f"base: {PAPER}\narguments: [--bf16]", "arguments: neither stated nor assumed"),
    "both": (
        f"base: {PAPER}\ntraining.lr: 1.0\nstated: {{training.lr: x}}\nassumed: {{training.lr: y}}",
        "training.lr: both stated and assumed",
    ),
    "of nothing": (f"base: {PAPER}\nstated: {{training.x: y}}", "stated.training.x: there is no"),
    "no reason": (f"base: {PAPER}\nassumed: {{training.lr: ' '}}", "assumed.training.lr: expected"),
    "reasons": (f"base: {PAPER}\nassumed: [training.lr]", "assumed: a mapping expected"),
    "sweep of stated": (f"base: {PAPER}\nsweep: {{parallel.tp: [4]}}", "sweep.parallel.tp: stated"),
    "sweep of nothing": (f"base: {PAPER}\nsweep: {{training.beta: [1]}}", "sweep.training.beta: "),
    "sweep of a number": (f"base: {PAPER}\nsweep: {{1: [4]}}", "sweep.1: there is no such value"),
    "no sweep": (f"base: {PAPER}\nsweep: {{training.lr: 1.0}}", "a list expected, 1.0 given"),
    "empty sweep": (f"base: {PAPER}\nsweep: {{training.lr: []}}", "a list expected, [] given"),
}


@pytest.mark.parametrize("case", FILES)
def test_files_that_are_no_experiments(case, tmp_path):
    text, message = FILES[case]
    put(tmp_path, "other", "base: it.yaml")
    put(tmp_path, "mine", "layers: 2\nstated: {layers: test}")
    tiny = yaml.safe_load((CONFIGS / "models/tiny.yaml").read_text())
    put(tmp_path, "most", {key: value for key, value in tiny.items() if key != "swiglu"})
    with pytest.raises(ExperimentError) as caught:
        load(put(tmp_path, "it", text))
    assert message in str(caught.value)


def test_a_delta_changes_what_it_says_and_nothing_else(tmp_path):
    """Here upon a base of a base from another folder, whose values keep their reasons."""
    (tmp_path / "below").mkdir()
    why = "assumed: {training: a, training.seed: c}"
    put(tmp_path, "first", f"base: {PAPER}\ntraining: {{lr: 1e-3, seed: 5}}\n{why}")
    delta = "base: ../first.yaml\ntraining.lr: 2e-3\nassumed: {training.lr: b}"
    new, old = load(put(tmp_path / "below", "second", delta)), load(PAPER)
    for arm, workload in old.arms.items():
        training = dataclasses.replace(workload.training, lr=2e-3, seed=5)
        assert new.arms[arm] == dataclasses.replace(workload, training=training)
    changed = {"training.lr": "b", "training.seed": "c"}
    assert new.assumed == old.assumed | changed
    assert (new.stated, new.paper, new.sweep) == (old.stated, old.paper, old.sweep)


def test_a_model_replaces_the_whole_of_another(tmp_path):
    before, after = load(PAPER), load(PAPER, {"model": "llama2-70b", "parallel.virtual_stages": 1})
    assert after.arms["te"].model == load("paper/llama2-70b_a100-pcie").arms["te"].model
    assert "Table 2.1" in before.stated["model.layers"]
    assert "LLaMA paper" in after.stated["model.layers"]
    text = "model: gpt3-175b-4-layers\nmodel.layers: 8\nassumed: {model.layers: test}"
    model = load(put(tmp_path, "delta", f"base: {PAPER}\n{text}")).arms["flux"].model
    assert (model.layers, model.name) == (8, "gpt3-175b-4-layers")


def test_the_example_of_the_page_is_an_experiment(tmp_path):
    """An arm's own values and arguments too."""
    example = (ROOT / "docs/cluster.md").read_text().split("```yaml\n")[1].split("```")[0]
    assert "base: paper/" in example
    file = put(tmp_path, "mine", example.replace("base: ", f"base: {CONFIGS}/experiments/", 1))
    found = load(file)
    recompute = {arm: workload.training.recompute for arm, workload in found.arms.items()}
    assert recompute == {"megatron": "none", "te": "none", "flux": "selective"}
    assert found.stated["parallel.pp"].startswith("our cluster's job")
    assert found.assumed["arms.flux.training.recompute"].startswith("to see whether")
    assert found.extra_arguments["megatron"] == ["--log-params-norm"]


def test_overrides_are_assumptions_of_the_caller():
    texts = ["parallel.pp = 16", "parallel.dp=1", "arms.te.training.recompute=full"]
    found = load(PAPER, overrides(texts, example=""))
    assert found.arms["te"].training.recompute == "full"
    assert found.arms["flux"].parallel.pp == 16
    for key in ("parallel.pp", "arms.te.training.recompute"):
        assert found.assumed[key] == "set by the caller"
    assert "parallel.pp" not in found.stated


# --- what we ship


@pytest.mark.parametrize("name", ALL)
def test_every_scalar_has_one_source(name):
    found = load(name)
    assert not found.stated.keys() & found.assumed.keys()
    given = found.stated.keys() | found.assumed.keys()
    for workload in found.arms.values():
        keys = flat(dataclasses.asdict(workload)).keys() - {"model.name", "cluster.name", "arm"}
        optional = "health", "experts", "fp8", "environment"
        keys -= {key for key in keys - given if any(one in key for one in optional)}
        assert keys <= given
        of_arms = tuple(f"arms.{one}." for one in found.arms)
        assert all(key in keys or key.startswith(of_arms) or "." not in key
                   for key in given if "health" not in key)  # fmt: skip


def test_the_experiments_of_the_paper_are_there():
    models, clusters = ("gpt3-175b", "llama2-70b"), ("a100-pcie", "a100-nvlink", "h800-nvlink")
    for model, cluster in ((m, c) for m in models for c in clusters):
        found = load(f"paper/{model}_{cluster}")
        assert found.arms.keys() == {"megatron", "te", "flux"}
        assert {"section", "speedup_over_megatron"} <= found.paper.keys()
        for workload in found.arms.values():
            assert (workload.model.name, workload.cluster.name) == (model, cluster)
            degrees = workload.parallel
            assert (degrees.tp, degrees.pp, degrees.dp) == (8, 8, 2)
            assert degrees.sequence_parallel
            assert (workload.training.dtype, workload.tokens) == ("bfloat16", 4096)
        unstated = {f"training.{name}" for name in ("micro_batch", "global_batch", "recompute")}
        assert unstated | {"model.seq_length"} <= found.assumed.keys()


SIZES = {  # parameters of a layer's linear weights, by hand, and billions of all
    "gpt3-175b": (12 * 12288**2, 175),
    "llama2-70b": (8192 * (64 + 2 * 8) * 128 + 8192**2 + 3 * 8192 * 28672, 69),
}


@pytest.mark.parametrize("name", SIZES)
def test_models_have_their_published_sizes(name):
    model, (layer, billions) = load(f"paper/{name}_a100-pcie").arms["flux"].model, SIZES[name]
    embeddings = model.vocab * model.hidden * (1 if model.tied_embeddings else 2)
    assert (layer * model.layers + embeddings) / 1e9 == pytest.approx(billions, rel=0.005)


def test_what_is_swept_gives_experiments():
    """Or is refused for memory alone."""
    swept = [
        (name, key, one) for name in ALL for key, many in load(name).sweep.items() for one in many
    ]
    assert len(swept) > 100
    for name, key, value in swept:
        wrong: tuple[tuple[str, str], ...] = ()
        try:
            assert load(name, {key: value}).assumed[key] == "set by the caller"
        except ExperimentError as error:
            wrong = error.rules
        assert all("GiB" in rule for _, rule in wrong), (name, key, value)


def test_the_small_run_is_that_of_flux_megatron_train():
    flux = load("node/small_h200").arms["flux"]
    raw = yaml.safe_load((CONFIGS / "train/h200.yaml").read_text())
    assert flux.model.layers == raw["model"]["num_layers"]
    for key in ("hidden", "heads", "ffn", "seq_length"):
        assert getattr(flux.model, key) == raw["model"][key]
    for key in ("steps", "micro_batch", "global_batch", "lr", "seed", "dtype"):
        assert getattr(flux.training, key) == raw["train"][key]


def test_all_load_where_there_is_neither_torch_nor_triton():
    code = "from flux_megatron.launch.experiment import load, names\n"
    code += "import json; print(json.dumps([load(name).name for name in names()]))"
    assert json.loads(without_torch(code=code, more=("numpy",)).stdout) == ALL


def test_what_forbids_an_arm_forbids_no_other():
    """Userbuffers do not span nodes; Megatron and ours do."""
    over_nodes = {
        "cluster.nodes": 2, "cluster.gpus_per_node": 2,
        "cluster.nics": {"count": 1, "bandwidth_gbps": 50.0, "latency_us": 5.0},
    }  # fmt: skip
    name = "node/llama2-70b-8-layers_h200"
    with pytest.raises(ExperimentError, match="arm te overlaps only within one"):
        load(name, over_nodes)
    assert [*load(name, over_nodes, ["flux", "megatron"]).arms] == ["megatron", "flux"]
    with pytest.raises(LaunchError, match=r"some of .*'megatron', 'te', 'flux'.* expected"):
        load(name, {}, ["fluxx"])

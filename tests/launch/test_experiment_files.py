"""What files give: bases, whole models and clusters, overrides, sources, and all we ship."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from flux_megatron.config_files import flat
from flux_megatron.launch import experiment, inheritance, memory, rules
from flux_megatron.launch.errors import ExperimentError
from flux_megatron.launch.experiment import load, names, parse_override

ROOT = Path(__file__).parents[2]
CPU = str(ROOT / "configs/experiments/cpu/tiny.yaml")
PAPER = str(ROOT / "configs/experiments/paper/gpt3-175b_a100-pcie.yaml")
ALL = names()


def put(folder: Path, name: str, text: str) -> str:
    file = folder / f"{name}.yaml"
    file.write_text(text)
    return str(file)


# --- bases


def test_a_delta_changes_what_it_says_and_nothing_else(tmp_path):
    changes = "training: {micro_batch: 1, lr: 1e-3}\nassumed: {training: test}\n"
    new, old = load(put(tmp_path, "delta", f"base: {PAPER}\n{changes}")), load(PAPER)
    for arm, workload in old.arms.items():
        training = dataclasses.replace(workload.training, micro_batch=1, lr=1e-3)
        assert new.arms[arm] == dataclasses.replace(workload, training=training)
    assert new.paper == old.paper
    assert new.sweep == old.sweep


def test_bases_of_bases_from_other_folders(tmp_path):
    (tmp_path / "below").mkdir()
    put(
        tmp_path,
        "first",
        f"base: {CPU}\nassumed: {{training: a}}\ntraining: {{steps: 30, seed: 5}}",
    )
    put(
        tmp_path / "below",
        "second",
        "base: ../first.yaml\ntraining.steps: 40\nassumed: {training.steps: b}",
    )
    found = load(str(tmp_path / "below/second.yaml"))
    assert (found.arms["flux"].training.steps, found.arms["flux"].training.seed) == (40, 5)
    assert (found.assumed["training.steps"], found.assumed["training.seed"]) == ("b", "a")


def test_a_model_replaces_the_whole_of_another():
    """Nothing of the first may remain: the second leaves `swiglu` and others at their defaults."""
    before, after = load(PAPER), load(PAPER, {"model": "llama2-70b", "parallel.virtual_stages": 1})
    assert after.arms["te"].model == load("paper/llama2-70b_a100-pcie").arms["te"].model
    assert "Table 2.1" in before.stated["model.layers"]
    assert "LLaMA paper" in after.stated["model.layers"]


def test_a_part_may_be_changed_where_it_is_used(tmp_path):
    text = "model: gpt3-175b-4-layers\nmodel.layers: 8\nassumed: {model.layers: test}"
    file = put(tmp_path, "delta", f"base: {PAPER}\n{text}")
    assert load(file).arms["flux"].model.layers == 8
    assert load(file).arms["flux"].model.name == "gpt3-175b-4-layers"


def test_what_an_arm_says_is_its_own(tmp_path):
    text = (
        "arguments: [--log-throughput]\n"
        "arms: {flux: {training: {recompute: full}, arguments: [--flux-strict]}}\n"
        "assumed: {arguments arms: test}"
    )
    found = load(put(tmp_path, "delta", f"base: {PAPER}\n{text}"))
    recompute = {arm: workload.training.recompute for arm, workload in found.arms.items()}
    assert recompute == {"megatron": "none", "te": "none", "flux": "full"}
    assert found.extra_arguments["megatron"] == ["--log-throughput"]
    assert found.extra_arguments["flux"] == ["--log-throughput", "--flux-strict"]
    assert found.assumed["arms.flux.training.recompute"] == "test"


CYCLES = {
    "of one": {"a": "base: a.yaml"},
    "of two": {"a": "base: b.yaml", "b": "base: a.yaml"},
}


@pytest.mark.parametrize("case", CYCLES)
def test_cycles_of_bases_are_refused(case, tmp_path):
    for name, text in CYCLES[case].items():
        put(tmp_path, name, text)
    with pytest.raises(ExperimentError, match=r"base: inherits from itself: .*a.yaml -> .*a.yaml"):
        load(str(tmp_path / "a.yaml"))


NOT_YAML = {
    "absent": (None, "No such file"),
    "a list": ("[1]", "a mapping expected, list given"),
    "broken": ("a: [1", "not YAML"),
    "twice": ("program: train\nprogram: train", "given twice: program"),
    "twice, nested": ("training: {lr: 1, lr: 2}", "given twice: lr"),
    "no path": (f"base: [{CPU}]", "the path of a file expected"),
    "no base": ("base: elsewhere.yaml", "elsewhere.yaml: No such file"),
    "nothing in it": ("{}", "program: missing"),
    "one key missing": (
        f"base: {CPU}\nmodel: {{}}\nparallel: 3",
        "parallel: Input should be a mapping",
    ),
    "no arms": ("program: train", "arms: none given"),
}


@pytest.mark.parametrize("case", NOT_YAML)
def test_files_that_are_no_experiments(case, tmp_path):
    text, message = NOT_YAML[case]
    file = tmp_path / "it.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ExperimentError, match=message):
        load(str(file))


def test_a_missing_key_is_named_with_the_file_of_its_section(tmp_path):
    put(tmp_path, "mine", "layers: 2\nstated: {layers: test}")
    file = put(tmp_path, "delta", f"base: {CPU}\nmodel: mine.yaml")
    with pytest.raises(ExperimentError, match=rf"(?m)^{tmp_path}/.*: model.hidden: missing$"):
        load(file)


# --- overrides


def test_overrides_are_assumptions_of_the_caller():
    found = load(PAPER, {"training.micro_batch": 1, "arms.te.training.recompute": "full"})
    assert {w.training.micro_batch for w in found.arms.values()} == {1}
    assert found.arms["te"].training.recompute == "full"
    assert found.assumed["training.micro_batch"] == inheritance.BY_CALLER
    assert found.assumed["arms.te.training.recompute"] == inheritance.BY_CALLER
    stated = load(PAPER, {"parallel.pp": 16, "parallel.dp": 1})
    assert "parallel.pp" in stated.assumed
    assert "parallel.pp" not in stated.stated


def test_a_wrong_override_is_named():
    with pytest.raises(ExperimentError) as caught:
        load(PAPER, {"training.micro": 1})
    assert (caught.value.file, caught.value.key) == ("--set", "training.micro")
    assert "did you mean 'micro_batch'?" in caught.value.rule


def test_overrides_as_text():
    assert parse_override("training.micro_batch=2") == ("training.micro_batch", 2)
    assert parse_override("training.lr = 3e-4") == ("training.lr", 3e-4)
    assert parse_override("training.recompute=none") == ("training.recompute", "none")
    for text in ("training.lr", "=3", "a=[1"):
        with pytest.raises(ExperimentError, match="--set"):
            parse_override(text)


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(ExperimentError, match=r"did you mean cpu/tiny\?"):
        load("cpu/tini")


# --- where values are from


@pytest.mark.parametrize("name", ALL)
def test_every_scalar_has_one_source(name):
    found = load(name)
    assert not found.stated.keys() & found.assumed.keys()
    given = found.stated.keys() | found.assumed.keys()
    for workload in found.arms.values():
        values = dataclasses.asdict(workload)
        arm = values.pop("arm")
        keys = flat(values).keys() - {"model.name", "cluster.name"}
        left_out = {key for key in keys - given if key.startswith(experiment.OPTIONAL)}
        assert keys - left_out <= given
        assert all(key in keys or f"arms.{arm}" in key or "." not in key for key in given)
    assert {"program", "megatron_lm"} <= given


UNEXPLAINED = {
    "new value": ("training.steps: 50", "training.steps: neither stated nor assumed here"),
    "a stated one": ("parallel: {pp: 4, dp: 4}", "parallel.pp: neither stated nor assumed here"),
    "an arm's": ("arms.te.training.lr: 1.0", "arms.te.training.lr: neither stated nor assumed"),
    "arguments": ("arguments: [--bf16]", "arguments: neither stated nor assumed"),
    "both": (
        "training.lr: 1.0\nstated: {training.lr: x}\nassumed: {training.lr: y}",
        "training.lr: both stated and assumed",
    ),
    "of nothing": ("stated: {training.momentum: x}", "stated.training.momentum: there is no such"),
    "without a reason": (
        "training.lr: 1.0\nassumed: {training.lr: ' '}",
        "assumed.training.lr: exp",
    ),
    "a list": ("assumed: [training.lr]", "assumed: a mapping expected"),
}


@pytest.mark.parametrize("case", UNEXPLAINED)
def test_a_value_without_its_source_is_refused(case, tmp_path):
    text, message = UNEXPLAINED[case]
    file = put(tmp_path, "delta", f"base: {PAPER}\n{text}")
    with pytest.raises(ExperimentError) as caught:
        load(file)
    assert f"{file}: {message}" in str(caught.value)


def test_defaults_need_a_source_too(tmp_path):
    raw = yaml.safe_load((ROOT / "configs/models/tiny.yaml").read_text())
    raw["assumed"] = {"layers hidden heads kv_heads ffn seq_length vocab": "test"}
    del raw["swiglu"], raw["norm"], raw["position"], raw["linear_bias"], raw["tied_embeddings"]
    put(tmp_path, "mine", yaml.safe_dump(raw))
    with pytest.raises(ExperimentError, match=r"model.swiglu: neither stated nor assumed"):
        load(put(tmp_path, "delta", f"base: {CPU}\nmodel: mine.yaml"))


SWEEPS = {
    "stated": (
        "parallel.tp: [4, 8]",
        "sweep.parallel.tp: configs/experiments/paper/base.yaml stat",
    ),
    "nothing": ("training.beta: [1]", "sweep.training.beta: there is no such value"),
    "no list": ("training.lr: 1.0", "sweep.training.lr: a list expected, 1.0 given"),
    "empty": ("training.lr: []", "sweep.training.lr: a list expected, [] given"),
}


@pytest.mark.parametrize("case", SWEEPS)
def test_sweeps_are_of_what_is_assumed(case, tmp_path):
    text, message = SWEEPS[case]
    with pytest.raises(ExperimentError) as caught:
        load(put(tmp_path, "delta", f"base: {PAPER}\nsweep: {{{text}}}"))
    assert message in str(caught.value)


# --- what we ship


def test_the_experiments_of_the_paper_are_there():
    models, clusters = ("gpt3-175b", "llama2-70b"), ("a100-pcie", "a100-nvlink", "h800-nvlink")
    for model in models:
        for cluster in clusters:
            found = load(f"paper/{model}_{cluster}")
            assert found.arms.keys() == {"megatron", "te", "flux"}
            assert found.megatron_lm == "core_v0.16.1"
            assert {"section", "speedup_over_megatron"} <= found.paper.keys()
            for workload in found.arms.values():
                assert (workload.model.name, workload.cluster.name) == (model, cluster)
                degrees = workload.parallel
                assert (degrees.tp, degrees.pp, degrees.dp) == (8, 8, 2)
                assert degrees.sequence_parallel
                assert workload.training.dtype == "bfloat16"
                assert workload.tokens == 4096
            unstated = {f"training.{name}" for name in ("micro_batch", "global_batch", "recompute")}
            assert unstated | {"model.seq_length"} <= found.assumed.keys()


SIZES = {  # parameters of a layer's linear weights, by hand
    "gpt3-175b": 12 * 12288**2,
    "llama2-70b": 8192 * (64 + 2 * 8) * 128 + 8192**2 + 3 * 8192 * 28672,
}


@pytest.mark.parametrize(("name", "billions"), [("gpt3-175b", 175), ("llama2-70b", 69)])
def test_models_have_their_published_sizes(name, billions):
    model = load(f"paper/{name}_a100-pcie").arms["flux"].model
    embeddings = model.vocab * model.hidden * (1 if model.tied_embeddings else 2)
    assert (SIZES[name] * model.layers + embeddings) / 1e9 == pytest.approx(billions, rel=0.005)


def alternatives() -> Iterator[tuple[str, str, object]]:
    for name in ALL:
        for key, values in load(name).sweep.items():
            yield from ((name, key, value) for value in values)


def test_what_is_swept_gives_experiments():
    """Or is refused for memory alone, and of each sweep the value itself is one."""
    seen = 0
    for name, key, value in alternatives():
        seen += 1
        with contextlib.suppress(ExperimentError), only_for_memory():
            assert load(name, {key: value}).assumed[key] == inheritance.BY_CALLER
    assert seen > 100


@contextlib.contextmanager
def only_for_memory() -> Iterator[None]:
    try:
        yield
    except ExperimentError as error:
        if not all("GiB" in one.rule for one in error.errors):
            pytest.fail(str(error))
        raise


def test_arms_fit_beside_each_other():
    for name in ALL:
        for workload in load(name).arms.values():
            assert memory.estimate(workload).fits(workload.cluster)


def test_the_small_run_is_that_of_flux_megatron_train():
    model = load("node/small_h200").arms["flux"].model
    raw = yaml.safe_load((ROOT / "configs/train/h200.yaml").read_text())
    assert (model.layers, model.hidden, model.heads, model.ffn, model.seq_length) == tuple(
        raw["model"][k] for k in ("num_layers", "hidden", "heads", "ffn", "seq_length")
    )
    training = load("node/small_h200").arms["flux"].training
    for key in ("steps", "micro_batch", "global_batch", "lr", "seed", "dtype"):
        assert getattr(training, key) == raw["train"][key]


def test_all_load_where_there_is_neither_torch_nor_triton():
    code = (
        "import sys\n"
        "for name in ('torch', 'triton', 'numpy', 'megatron'): sys.modules[name] = None\n"
        "from flux_megatron.launch.experiment import load, names\n"
        "import json; print(json.dumps([load(name).name for name in names()]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ALL


def test_the_example_of_the_page_is_an_experiment(tmp_path):
    page = (ROOT / "docs/cluster.md").read_text()
    example = page.split("```yaml\n")[1].split("```")[0]
    base = "base: paper/base_gpt3-175b.yaml"
    assert base in example
    file = put(tmp_path, "mine", example.replace("base: ", f"base: {ROOT}/configs/experiments/", 1))
    found = load(file)
    assert found.arms["flux"].training.recompute == "selective"
    assert found.stated["parallel.pp"].startswith("our cluster's job")
    assert found.extra_arguments["megatron"] == ["--log-params-norm"]


def test_our_loop_reads_as_many_tokens_as_the_rule_says():
    """The rule cannot ask the loop: neither may import the other."""
    from flux_megatron.lab.train.config import BYTE_VOCAB

    assert rules.BYTE_VOCAB == BYTE_VOCAB

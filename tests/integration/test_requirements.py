"""What a launch refuses by name: arguments in a parser like Megatron's, and changed functions."""

from __future__ import annotations

import argparse
import sys
import textwrap
import time
import types

import pytest

from flux_megatron import settings
from flux_megatron.errors import BadInput
from flux_megatron.integration import arguments, bootstrap, requirements, seams, spec_argument
from flux_megatron.integration.flags import add_flux_arguments
from flux_megatron.patching import installed

REFUSED = [row for row in arguments.table().values() if row.kind == "refused"]
UNTRIED = [row for row in arguments.table().values() if row.kind == "untried"]


def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Some of Megatron's own, of each class, and one that flux_megatron does not know."""
    parser.add_argument("--transformer-impl", default="transformer_engine")
    parser.add_argument("--train-iters", type=int)
    parser.add_argument("--use-checkpoint-args", action="store_true")
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--moe-latent-size", type=int)
    parser.add_argument("--fp8-format", dest="fp8")
    parser.add_argument("--symmetric-ar-type")
    parser.add_argument("--sft", action="store_true")
    parser.add_argument("--brand-new", type=int, default="7")
    parser.add_argument("--no-brand-new-fusion", action="store_false", dest="brand_new_fusion")
    parser.add_argument("--no-gradient-accumulation-fusion", action="store_false", dest="fusion")
    return parser


def check(*options: str, script=lambda parser: parser) -> None:
    """As a launch does it; `script` is the script's extra_args_provider."""
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    known = arguments.arguments_of(parser)
    args = script(add_flux_arguments(parser)).parse_args(["--flux-overlap", *options])
    requirements.check(args, known)


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch):
    requirements._logged.clear()
    monkeypatch.delenv("FLUX_MEGATRON_ALLOW", raising=False)


def test_defaults_and_known_arguments_pass(capsys):
    check()
    check("--train-iters", "3", "--no-gradient-accumulation-fusion", "--brand-new", "7")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("row", REFUSED + UNTRIED, ids=lambda row: row.option)
def test_what_the_table_refuses_is_refused_by_name(row):
    name = row.option.lstrip("-")
    parser = argparse.ArgumentParser()
    parser.add_argument(row.option, dest="anything", action="store_true")
    args, known = parser.parse_args([row.option]), arguments.arguments_of(parser)
    with pytest.raises(ValueError, match=f"cannot go with:\n  {row.option}: ") as refused:
        requirements.check(args, known)
    assert row.because in str(refused.value)
    args.flux_allow = [name]
    if row.kind == "untried":
        assert str(refused.value).endswith(f"; --flux-allow {name} goes on")
        requirements.check(args, known)
    else:
        with pytest.raises(ValueError, match=row.option):
            requirements.check(args, known)


NEW = "--brand-new: flux_megatron does not know this argument (set to 1); --flux-allow brand-"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--brand-new 1", [NEW]),
        ("--no-brand-new-fusion", ["--no-brand-new-fusion: flux_megatron does not know this"]),
        ("--fp8-format hybrid --brand-new 1 --sft", ["--sft: ", NEW, "--fp8-format: "]),
        ("--sft --brand-new 1 --flux-allow sft", [NEW]),
        ("--fp8-format hybrid --flux-allow fp8-format", ["--fp8-format: "]),
        ("--symmetric-ar-type x --flux-allow symmetric-ar-type", ["--symmetric-ar-type: "]),
    ],
)
def test_unknown_and_refused_arguments_are_named(line, expected):
    with pytest.raises(ValueError, match="cannot go with") as refused:
        check(*line.split())
    lines = str(refused.value).splitlines()[1:]
    assert len(lines) == len(expected)
    assert all(one.startswith(f"  {start}") for one, start in zip(lines, expected, strict=True))


def test_what_is_allowed_goes_on_and_is_said(monkeypatch, capsys):
    check("--brand-new", "1", "--sft", "--flux-allow", "sft,brand-new", "unused")
    printed = "flux_megatron: --flux-allow goes on with --sft, --brand-new\n"
    assert capsys.readouterr().out == printed
    monkeypatch.setenv("FLUX_MEGATRON_ALLOW", "brand-new")
    check("--brand-new", "1")
    with pytest.raises(ValueError, match=r"--sft: [^\n]*$"):
        check("--brand-new", "1", "--sft")


def test_arguments_of_the_user_s_script_are_its_own():
    def script(parser):
        parser.add_argument("--fp4-format", action="store_true")  # not Megatron's in this version
        parser.add_argument("--mine", type=int, default=0)
        return parser

    check("--mine", "3", "--fp4-format", script=script)


def test_a_default_that_the_script_changes_counts():
    def script(parser):
        parser.set_defaults(fp8="hybrid")
        return parser

    with pytest.raises(ValueError, match="--fp8-format"):
        check(script=script)


def test_the_strictest_option_of_an_argument_counts():
    argument = arguments.Argument(("--new-name", "--seed", "--sft"), False)
    assert arguments.row_of(argument).option == "--sft"


@pytest.fixture
def megatron(monkeypatch):
    """A Megatron whose arguments have been imported."""
    module = types.ModuleType(arguments.PARSER)
    module.add_megatron_arguments = add_megatron_arguments
    for name, value in (("megatron.training", types.ModuleType("megatron.training")),
                        (arguments.PARSER, module)):  # fmt: skip
        monkeypatch.setitem(sys.modules, name, value)
    sys.modules["megatron.training"].arguments = module
    return module


def test_without_the_parser_megatron_s_is_made_anew(megatron):
    args = argparse.Namespace(transformer_impl="local", brand_new=3)
    with pytest.raises(ValueError, match="--brand-new"):
        requirements.check(args)
    args.brand_new = 7
    requirements.check(args)


def test_what_megatron_changed_since_does_not_matter(megatron, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pretrain.py", "--train-iters", "3", "--of-the-script"])
    args = argparse.Namespace(transformer_impl="local", sft=True, fusion=False)
    requirements.check(args, parsed=arguments.parse_command_line())
    sys.argv.append("--sft")
    with pytest.raises(ValueError, match="--sft"):
        requirements.check(args, parsed=arguments.parse_command_line())


def test_the_specification_looks_at_the_command_line(megatron, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pretrain.py", "--transformer-impl", "local", "--sft"])
    args = argparse.Namespace(transformer_impl="local", sft=False)
    monkeypatch.setattr(spec_argument, "_parsed_arguments", lambda: args)
    with pytest.raises(ValueError, match="--sft"):
        spec_argument.layer_spec_of_this_run()


def test_the_door_looks_at_megatron_s_own_arguments(megatron, monkeypatch):
    """Also where Megatron's parser is made anew in a process with our bootstrap."""
    seen = []
    monkeypatch.setattr("flux_megatron.integration.install.install_from",
                        lambda args, known: seen.append(known))  # fmt: skip
    bootstrap.extend_parser()
    parser = megatron.add_megatron_arguments(argparse.ArgumentParser())
    parser.add_argument("--of-the-script")
    parser.parse_args(["--flux-overlap", "--sft"])
    (known,) = seen
    assert known == arguments.arguments_of_megatron()
    assert known["sft"].options == ("--sft",)
    assert not {"flux_overlap", "of_the_script"} & known.keys()
    assert arguments.parse_command_line().train_iters is None
    assert len(seen) == 1
    with pytest.raises(BadInput, match=r"unrecognized arguments: --flux-overlp \(see --help\)$"):
        parser.parse_args(["--flux-overlp"])


WHOLE = types.SimpleNamespace(name="full_iteration")  # of an enumeration


@pytest.mark.parametrize(
    "given",
    [
        {"cuda_graph_impl": "full_iteration", "cuda_graph_modules": []},
        {"cuda_graph_scope": [WHOLE, "attn"], "cuda_graph_impl": "local"},
        {"cuda_graph_modules": ["full_iteration"], "cuda_graph_impl": "local"},
        {"cuda_graph_scope": "full_iteration", "cuda_graph_impl": "local"},
    ],
)
def test_graphs_of_whole_iterations_need_to_be_allowed(monkeypatch, given):
    """To a launch, and to the configuration of a model that is built in Python."""
    args, name = argparse.Namespace(**given), next(iter(given))
    (found,) = requirements.refusals(args, {})
    assert found.may_be_allowed
    assert found.name == f"--{name.replace('_', '-')} full_iteration"
    with pytest.raises(ValueError, match=f"{name} is 'full_iteration': whole iterations were"):
        seams.check_config(args)
    monkeypatch.setenv("FLUX_MEGATRON_ALLOW", found.allowed_as)
    settings.reload()
    seams.check_config(args)
    monkeypatch.undo()
    settings.reload()


def test_checkpoints_of_modelopt_are_refused(tmp_path):
    args = argparse.Namespace(load=str(tmp_path))
    (tmp_path / "iter_0000003").mkdir()
    assert not requirements.refusals(args, {})
    (tmp_path / "iter_0000003" / "modelopt_state").mkdir()
    (refusal,) = requirements.refusals(args, {})
    assert str(refusal).startswith(f"--load {tmp_path}: a checkpoint of ModelOpt")


# functions of Megatron


def test_a_changed_function_is_refused_until_it_is_allowed(monkeypatch):
    args = argparse.Namespace()
    requirements.check(args, {})
    changed = (("train_step", "its text in training.py is that of no release that we know"),)
    monkeypatch.setattr(installed, "changed", lambda: changed)
    with pytest.raises(ValueError, match=r"train_step: its text .*; --flux-allow train_step"):
        requirements.check(args, {})
    args.flux_allow = ["train_step"]
    requirements.check(args, {})


def test_the_files_that_would_be_imported_are_compared(tmp_path, monkeypatch):
    """A checkout's training loop beside a wheel's megatron.core, which is as recorded."""
    loop = tmp_path / "megatron" / "training" / "training.py"
    loop.parent.mkdir(parents=True)
    loop.write_text(
        textwrap.dedent("""
        def train_step(optimizer):
            return optimizer.step()
    """)
    )
    (loop.parent / "__init__.py").touch()
    import megatron

    monkeypatch.setattr(megatron, "__path__", [str(tmp_path / "megatron"), *megatron.__path__])
    names = [n for n, why in installed.changed.__wrapped__() if "megatron/training" in why]
    assert names == [
        "get_model", "save_checkpoint_and_time", "setup_model_and_optimizer", "train_step",
        "training_log",
    ]  # fmt: skip


def test_a_known_megatron_costs_no_time():
    installed.changed.__wrapped__()
    start = time.process_time()
    installed.changed.__wrapped__()
    assert time.process_time() - start < 0.2


def test_other_variants_of_attention_are_refused():
    args = argparse.Namespace(experimental_attention_variant="dsa")
    (refusal,) = requirements.refusals(args, {})
    expected = "one of gated_delta_net, gdn, gdn2 expected"
    assert str(refusal) == f"--experimental-attention-variant dsa: {expected}"
    with pytest.raises(ValueError, match=f"experimental_attention_variant is 'dsa': {expected}"):
        seams.check_config(args)


TE, LOCAL = True, False  # the layers that Megatron is to build
SCOPES = ("full", "attn", ["attn", "mlp"], None)
DEFERRED, DELAYED = {"defer_embedding_wgrad_compute": True}, {"delay_wgrad_compute": True}
WITH_FSDP, LATENT = DELAYED | {"use_megatron_fsdp": True}, {"multi_latent_attention": True}
NETS = [{"experimental_attention_variant": name} for name in seams.GATED_DELTA_NETS]
HYBRID = "megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec"
ANOTHER = {"spec": ["my.specs", "mine"]}
GRAPHS = DELAYED | {"cuda_graph_impl": "transformer_engine"}
FP8 = {"fp8": "hybrid", "fp8_recipe": "tensorwise", "sequence_parallel": True,
       "tensor_model_parallel_size": 2}  # fmt: skip
LOST = {
    "mtp_num_layers": 1, "pipeline_model_parallel_size": 2,
    "gradient_accumulation_fusion": True, "untie_embeddings_and_output_weights": False,
}  # fmt: skip
PASS = [
    *((LOCAL, {"cuda_graph_impl": "local", "cuda_graph_scope": scope}) for scope in SCOPES),
    (LOCAL, {"export_real_quant_cfg": "None", "export_num_medusa_heads": 0,
             "export_kd_teacher_load": None, "modelopt_enabled": False}),
    (LOCAL, DEFERRED), (LOCAL, DEFERRED | {"flux_layers": ["fc1", "qkv"]}),
    (TE, DEFERRED | {"flux_layers": ["head"]}),
    (TE, DELAYED), (TE, LATENT), (TE, {"spec": HYBRID.split()}), *((TE, net) for net in NETS),
    (LOCAL, LOST | {"mtp_num_layers": None}), (LOCAL, LOST | {"pipeline_model_parallel_size": 1}),
    (LOCAL, LOST | {"gradient_accumulation_fusion": False}),
    (LOCAL, LOST | {"untie_embeddings_and_output_weights": True}),
    (TE, GRAPHS | {"cuda_graph_modules": ["moe_router", "moe_preprocess"]}),
    (TE, GRAPHS | {"cuda_graph_scope": "attn"} | FP8),
    (TE, GRAPHS | {"cuda_graph_scope": "attn", "cuda_graph_impl": "local"}),
    (TE, GRAPHS | {"cuda_graph_scope": "attn", "delay_wgrad_compute": False}),
    (TE, FP8), (TE, FP8 | {"fp8_recipe": "delayed"}), (TE, FP8 | LATENT),
    (TE, FP8 | {"sequence_parallel": False, "tensor_model_parallel_size": 1}),
]  # fmt: skip
REFUSE = [
    (LOCAL, DEFERRED | {"flux_layers": ["fc1", "head"]}, "--defer-embedding-wgrad-compute: "),
    (LOCAL, DELAYED, "--delay-wgrad-compute: "), (LOCAL, WITH_FSDP, "--delay-wgrad-compute: "),
    (LOCAL, LATENT, "--multi-latent-attention: it needs"),
    (TE, LATENT | {"transformer_impl": "local"}, "--multi-latent-attention: it needs"),
    (LOCAL, {"spec": HYBRID.split()}, f"--spec {HYBRID}: hybrid models need TransformerEngine's"),
    (LOCAL, ANOTHER, "--spec my.specs mine: it says"), (TE, ANOTHER, "--spec my.specs mine: it"),
    *((LOCAL, net, "--experimental-attention-variant: it needs TransformerEngine's layers: "
       "Megatron builds it of nothing else") for net in NETS),
    (TE, GRAPHS, "--delay-wgrad-compute True: "),
    (TE, DELAYED | {"external_cuda_graph": True}, "--delay-wgrad-compute True: "),
    (TE, GRAPHS | {"cuda_graph_scope": ["attn", "moe_router"]}, "--delay-wgrad-compute True: "),
    (TE, GRAPHS | {"cuda_graph_modules": "attn"}, "--delay-wgrad-compute True: "),
    (TE, GRAPHS | {"cuda_graph_scope": "full"}, "--delay-wgrad-compute True: "),
    (TE, GRAPHS | {"cuda_graph_scope": ["moe_router"], "moe_shared_expert_intermediate_size": 8},
     "--delay-wgrad-compute True: "),
    (LOCAL, FP8, "--fp8-format: it needs --transformer-impl transformer_engine"),
    (TE, FP8 | {"sequence_parallel": False}, "--fp8-format: without --sequence-parallel"),
    (TE, FP8 | {"fp8_recipe": "mxfp8"},
     f"--fp8-recipe mxfp8: one of {', '.join(requirements.FP8_RECIPES)} expected"),
]  # fmt: skip
UNTRIED_TOGETHER = [
    (TE, WITH_FSDP, "--delay-wgrad-compute: "),
    (LOCAL, LOST, "--mtp-num-layers: "),
    (TE, DEFERRED | {"mtp_num_layers": 1}, "--defer-embedding-wgrad-compute True: "),
    (TE, FP8 | {"fp8_recipe": "blockwise"}, "--fp8-recipe blockwise: it takes the host longer"),
    (TE, FP8 | {"spec": requirements.OUR_SPEC}, "--fp8-format: it was never tried with --spec"),
]


@pytest.mark.parametrize(
    ("of_te", "given", "start", "may_be_allowed"),
    [(*row, "", False) for row in PASS]
    + [(*row, False) for row in REFUSE]
    + [(*row, True) for row in UNTRIED_TOGETHER],
)
def test_values_are_refused_by_name(monkeypatch, of_te, given, start, may_be_allowed):
    monkeypatch.setattr(requirements, "te_can_run", lambda: of_te)
    args = argparse.Namespace(**{"transformer_impl": "transformer_engine", **given})
    found = requirements.refusals(args, {})
    assert len(found) == bool(start)
    for refusal in found:
        assert str(refusal).startswith(start)
        assert refusal.may_be_allowed is may_be_allowed
    if not start:
        seams.check_config(args)

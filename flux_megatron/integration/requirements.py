"""What `--flux-overlap` refuses, by name and before a run starts.

Each argument by itself is in the table of `arguments`. Here is what depends on values or on several
arguments, and on the functions of Megatron that we replace or rely on.

Not here: what only costs the overlap, such as a tensor-parallel group that spans nodes. Such calls
run without it and are counted with the reason, or fail under `--flux-strict`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.extensions import transformer_engine

from flux_megatron import settings
from flux_megatron.integration import arguments, experts, seams
from flux_megatron.integration.arguments import Argument
from flux_megatron.integration.provider import te_can_run
from flux_megatron.patching import installed

OUR_SPEC = ["flux_megatron.specs", "flux_layer_spec"]
_TE_ALONE = "only TransformerEngine's linear layers do it"
FP8_RECIPES = ("delayed", "tensorwise", "blockwise")  # Megatron's default is the first
NOTHING = "tensor parallel size is 1, so no call has communication to overlap"
_HYBRID = (
    "megatron.core.models.mamba.mamba_layer_specs",
    "megatron.core.models.hybrid.hybrid_layer_specs",
)
_MODELOPT = "ModelOpt builds models of its own layers"

# Arguments that scripts add for ModelOpt and that ask for its models, with their neutral values:
# a teacher in every version, the others in 0.14.
MODELOPT = {
    "modelopt_enabled": False,
    "export_kd_teacher_load": None,
    "export_quant_cfg": None,
    "export_real_quant_cfg": "None",
    "export_num_medusa_heads": 0,
    "export_num_eagle_layers": 0,
}


@dataclass(frozen=True)
class Refusal:
    """`name`: an option, perhaps with its value, or a function of Megatron."""

    name: str
    why: str
    may_be_allowed: bool = False

    @property
    def allowed_as(self) -> str:
        """What `--flux-allow` calls it: no leading dashes, which would be an option of its own."""
        return self.name.split()[0].lstrip("-")

    def goes_on(self, allowed: Collection[str]) -> bool:
        return self.may_be_allowed and self.allowed_as in allowed

    def __str__(self) -> str:
        way_on = f"; --flux-allow {self.allowed_as} goes on" if self.may_be_allowed else ""
        return f"{self.name}: {self.why}{way_on}"


def check(args: Any, known: Mapping[str, Argument] | None = None, parsed: Any = None) -> None:
    """`ValueError` that lists everything that `--flux-overlap` refuses.

    `known`: the arguments of Megatron's own parser, by default of one that is made anew. `parsed`:
    the arguments as parsed, where `args` have changed since.
    """
    if known is None:
        known = arguments.arguments_of_megatron()
    allowed = names_allowed(args)
    refused: list[Refusal] = []
    waived: list[Refusal] = []
    for refusal in refusals(args, known, parsed):
        (waived if refusal.goes_on(allowed) else refused).append(refusal)
    if refused:
        raise ValueError("--flux-overlap cannot go with:\n" + "\n".join(f"  {r}" for r in refused))
    if waived:
        log_once("--flux-allow goes on with " + ", ".join(r.name for r in waived))


def refusals(args: Any, known: Mapping[str, Argument], parsed: Any = None) -> list[Refusal]:
    """All of them, those that may be allowed too."""
    found = list(_of_the_table(args if parsed is None else parsed, known))
    found += _of_values(args)
    found += [Refusal(name, why, may_be_allowed=True) for name, why in installed.changed()]
    return found


def names_allowed(args: Any) -> frozenset[str]:
    """Those of `--flux-allow`, by default of FLUX_MEGATRON_ALLOW."""
    given = getattr(args, "flux_allow", None)
    names = settings.names_in(" ".join(given)) if given else settings.read(os.environ).allow
    return frozenset(name.lstrip("-") for name in names)


def _of_the_table(args: Any, known: Mapping[str, Argument]) -> Iterator[Refusal]:
    for argument, value in arguments.non_defaults(args, known):
        row = arguments.row_of(argument)
        if row.kind == "refused":
            yield Refusal(row.option, row.because)
        elif row.kind == "untried":
            yield Refusal(row.option, f"{row.because} (set to {value!r})", may_be_allowed=True)


def _of_values(args: Any) -> Iterator[Refusal]:
    """A version of Megatron that lacks an argument cannot ask for it."""

    def value(name: str) -> Any:
        return getattr(args, name, None)

    of_te = value("transformer_impl") == "transformer_engine" and te_can_run()
    for name, wrong, why, may_be_allowed in seams.wrong_values(args):
        yield Refusal(f"--{name.replace('_', '-')} {wrong}", why, may_be_allowed)
    if value("experimental_attention_variant") in seams.GATED_DELTA_NETS and not of_te:
        why = "it needs TransformerEngine's layers: Megatron builds it of nothing else"
        yield Refusal("--experimental-attention-variant", why)
    layers = value("flux_layers")
    if value("multi_latent_attention") and not of_te:
        why = "it needs TransformerEngine's layers: Megatron's own attention cannot do it"
        yield Refusal("--multi-latent-attention", why)
    if value("qk_l2_norm") and not (of_te or value("num_experts") or value("spec") == OUR_SPEC):
        yield Refusal("--qk-l2-norm", "Megatron drops it where its local layers are all alike")
    if value("position_embedding_type") == "relative":
        yield Refusal("--position-embedding-type relative", _TE_ALONE)
    spec = value("spec")
    if spec not in (None, OUR_SPEC) and not (of_te and spec[0] in _HYBRID):
        why = "it says itself which layers are built"
        if spec[0] in _HYBRID:
            why = "hybrid models need TransformerEngine's layers"
        yield Refusal("--spec " + " ".join(spec), why)
    if value("delay_wgrad_compute") and not of_te:
        why = "Megatron delays with TransformerEngine's layers alone"
        yield Refusal("--delay-wgrad-compute", why)
    elif value("delay_wgrad_compute") and value("use_megatron_fsdp"):
        why = "it was never tried with --use-megatron-fsdp"
        yield Refusal("--delay-wgrad-compute", why, may_be_allowed=True)
    if (
        value("defer_embedding_wgrad_compute")
        and layers
        and not (of_te or {"qkv", "fc1"} <= {*layers})
    ):
        yield Refusal(
            "--defer-embedding-wgrad-compute",
            "Megatron's local layers cannot go with it; --flux-layers with qkv and fc1 can",
        )
    if (
        value("mtp_num_layers")
        and (value("pipeline_model_parallel_size") or 1) > 1
        and value("gradient_accumulation_fusion")
        and not value("untie_embeddings_and_output_weights")
    ):
        why = (
            "with pipeline stages, tied embeddings and --gradient-accumulation-fusion Megatron "
            "itself loses a gradient, that of the last stage's embedding; "
            "--no-gradient-accumulation-fusion has it"
        )
        yield Refusal("--mtp-num-layers", why, may_be_allowed=True)
    if overlaps_nothing(args) and (value("flux_strict") or settings.read(os.environ).strict):
        yield Refusal("--flux-strict", NOTHING)
    if (value("context_parallel_size") or 1) > 1 and not transformer_engine.HAVE_TE:
        yield Refusal("--context-parallel-size", "it needs TransformerEngine's attention")
    if value("flux_experts"):
        yield from _of_experts(args)
    if value("fp8") is not None:
        yield from of_fp8(args, of_te)
    yield from _of_modelopt(args)


def overlaps_nothing(args: Any) -> bool:
    """Whether no call has a collective. Megatron's parser has a default of 1."""
    experts_too = getattr(args, "flux_experts", None)
    return getattr(args, "tensor_model_parallel_size", None) == 1 and not experts_too


def of_fp8(args: Any, of_te: bool) -> Iterator[Refusal]:
    """TransformerEngine's layers have FP8, and the seam for an operation that overlaps one. `args`:
    Megatron's arguments, or a configuration with their names.
    """
    name = "--fp8-format"
    if not of_te:
        yield Refusal(name, "it needs --transformer-impl transformer_engine, and it installed")
        return
    if not getattr(args, "sequence_parallel", False) and not overlaps_nothing(args):
        yield Refusal(name, "without --sequence-parallel TransformerEngine overlaps nothing")
    recipe = getattr(args, "fp8_recipe", None) or FP8_RECIPES[0]
    recipe = getattr(recipe, "value", recipe)  # of an enumeration
    if recipe not in FP8_RECIPES:
        yield Refusal(f"--fp8-recipe {recipe}", f"one of {', '.join(FP8_RECIPES)} expected")
    elif recipe == "blockwise":
        why = "it takes the host longer, so that small layers become slower"
        yield Refusal(f"--fp8-recipe {recipe}", why, may_be_allowed=True)
    if getattr(args, "spec", None):
        yield Refusal(name, "it was never tried with --spec", may_be_allowed=True)


def _of_experts(args: Any) -> Iterator[Refusal]:
    """What our dispatcher would refuse later, when ranks have started and build their layers."""
    dispatcher = getattr(args, "moe_token_dispatcher_type", None)
    if dispatcher not in experts.DISPATCHERS:
        expected = " or ".join(experts.DISPATCHERS)
        why = f"--moe-token-dispatcher-type {dispatcher} given, {expected} expected"
        yield Refusal("--flux-experts", why)
    elif dispatcher != "alltoall" and getattr(args, "flux_compare", None):
        why = "stock experts would have Megatron's all-to-all: --moe-token-dispatcher-type alltoall"
        yield Refusal("--flux-compare", why)
    tp = getattr(args, "tensor_model_parallel_size", None)  # Megatron's default for experts too
    divided = getattr(args, "expert_tensor_parallel_size", None) or tp or 1
    if getattr(args, "num_experts", None) and (why_not := experts.why_not(args, divided)):
        yield Refusal("--flux-experts", why_not)


def _of_modelopt(args: Any) -> Iterator[Refusal]:
    for name, neutral in MODELOPT.items():
        if getattr(args, name, neutral) != neutral:
            yield Refusal("--" + name.replace("_", "-"), _MODELOPT)
    load = getattr(args, "load", None)
    if load and any(Path(load).glob("*/modelopt_state")):
        yield Refusal(f"--load {load}", f"a checkpoint of ModelOpt: {_MODELOPT}")


_logged: set[str] = set()


def log_once(text: str, about: str = "") -> None:
    """On rank 0, one text `about` something. Megatron-LM parses its arguments up to three times."""
    if (about or text) not in _logged and os.environ.get("RANK", "0") == "0":
        print(f"flux_megatron: {text}", flush=True)
    _logged.add(about or text)

"""The layer specification behind `--spec`: Megatron asks for it once it has parsed arguments."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.spec_utils import ModuleSpec

from flux_megatron.integration import requirements, resolved
from flux_megatron.integration.arguments import parse_command_line
from flux_megatron.integration.flags import FluxOptions
from flux_megatron.integration.install import install

# what one layer is built of; Megatron passes none of it to a specification of --spec
OPTIONS = (
    "num_experts", "moe_grouped_gemm", "qk_layernorm", "qk_l2_norm", "multi_latent_attention",
    "normalization",
)  # fmt: skip


def layer_spec_of_this_run() -> ModuleSpec:
    """One layer of the model that Megatron's global arguments describe, built of ours.

    The norms and the LM head become ours too, as `--flux-overlap` does it to local layers; knobs
    are FLUX_MEGATRON_* variables. `ValueError` for what such a specification cannot express,
    `RuntimeError` before Megatron has parsed its arguments.
    """
    args = _parsed_arguments()
    requirements.check(args, parsed=parse_command_line())  # Megatron has validated and changed them
    if refused := _refusal(args):
        raise ValueError(f"--spec {' '.join(requirements.OUR_SPEC)}: {refused}")
    if not getattr(args, "flux_overlap", False):
        resolved.resolve(args)
        install(FluxOptions())
    return gpt_layer_specs.get_gpt_layer_local_spec(
        **{name: getattr(args, name) for name in OPTIONS}
    )


def _parsed_arguments() -> Any:
    from megatron.training import get_args

    try:
        return get_args()
    except AssertionError:
        raise RuntimeError(
            "flux_megatron.specs is for --spec: Megatron's arguments are not parsed yet"
        ) from None


def _refusal(args: Any) -> str | None:
    if args.transformer_impl != "local":
        return f"--transformer-impl {args.transformer_impl} given, local expected"
    if args.mtp_num_layers:
        return "Megatron 0.15 to 0.18 cannot combine it with --mtp-num-layers: use --flux-overlap"
    if args.num_experts and args.moe_layer_freq != 1:
        return "dense and expert layers alternate, one kind expected: use --flux-overlap"
    if getattr(args, "use_checkpoint_args", False) and not getattr(args, "flux_overlap", False):
        return "arguments of a checkpoint are looked at with --flux-overlap alone: use that"
    return None

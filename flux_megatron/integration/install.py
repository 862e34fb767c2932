"""What `--flux-overlap` does to a process: Megatron's models are made of our parts from then on."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
from collections.abc import Mapping
from typing import Any

from megatron.core.extensions import transformer_engine
from megatron.core.models import backends
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import transformer_block
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

import flux_megatron
from flux_megatron import settings
from flux_megatron.integration import beside, effect, requirements
from flux_megatron.integration.arguments import Argument
from flux_megatron.integration.attention import FluxCoreAttention
from flux_megatron.integration.flags import FluxOptions, options_from
from flux_megatron.integration.layers import FluxColumnParallelLinear
from flux_megatron.integration.norm import FluxNorm
from flux_megatron.integration.norm_places import LayerOfTE, with_norms_alone
from flux_megatron.integration.provider import FluxSpecProvider, StockSpecProvider, te_can_run
from flux_megatron.integration.selection import provider_of
from flux_megatron.integration.specs import use_flux_output_layer
from flux_megatron.integration.wgrad_module import provide_wgrad_kernels

_output_layer = contextlib.ExitStack()  # holds the replaced LM head in its place


def install_from(args: Any, known: Mapping[str, Argument] | None = None) -> None:
    """Do what Megatron's parsed arguments ask for; without `--flux-overlap` nothing.

    Call it before Megatron validates them, or at least before models are built; another call
    changes nothing more. `known`: the arguments of Megatron's own parser, by default of one that is
    made anew. `ValueError` for what cannot be had together.
    """
    options = options_from(args)
    if options is None:
        return
    requirements.check(args, known)
    beside.settle(args)
    # an earlier call may have left "local" in these arguments
    of_te = gpt_layer_specs.TransformerLayerSubmodules is LayerOfTE
    install(options, of_te or args.transformer_impl == "transformer_engine")
    # else all masks of causal layers are causal, and torch's flash attention need not read them
    FluxCoreAttention.reads_causal_masks = bool(getattr(args, "reset_attention_mask", False))
    if args.transformer_impl != "local":
        _say_once(_instead_of(args.transformer_impl))
        args.transformer_impl = "local"


def install(options: FluxOptions, instead_of_te: bool = False) -> None:
    """Settings, and our linears in the layers that were chosen, for models built after this.

    Checkpoints have the keys of TransformerEngine's layers if ours stand for those and it can run,
    else those of Megatron's local layers.
    """
    os.environ.update(options.environment())
    settings.reload()
    FluxColumnParallelLinear.save_gathered = bool(options.save_gathered)
    provider = provider_of(options.layers) if options.layers else FluxSpecProvider
    if instead_of_te and te_can_run():
        build_from(with_norms_alone(provider), LayerOfTE)
    else:
        build_from(provider)
    effect.install(options.compare)
    _output_layer.close()
    if not options.layers or "head" in options.layers:
        _output_layer.enter_context(use_flux_output_layer())
    _tell_at_exit()


def build_from(
    provider: type[StockSpecProvider],
    layer: type[TransformerLayerSubmodules] = TransformerLayerSubmodules,
) -> None:
    """Make Megatron's local specifications of this provider's classes, final norms too.

    Linear layers that stay stock can then fuse their weight gradients without apex.
    """
    backends.LocalSpecProvider = gpt_layer_specs.LocalSpecProvider = provider
    gpt_layer_specs.TransformerLayerSubmodules = layer
    gpt_layer_specs.LNImpl = provider().layer_norm()
    # the final norm where all layers are alike: in Megatron it does not depend on their kind
    transformer_block.LayerNormImpl = transformer_engine.TENorm if te_can_run() else FluxNorm
    provide_wgrad_kernels()


def _instead_of(transformer_impl: str) -> str:
    parts = "linear layers and norms are ours, attention is torch's"
    if te_can_run():
        parts = (
            "linear layers and the norms before them are ours, attention and other norms are "
            "TransformerEngine's"
        )
    return f"--transformer-impl local, not {transformer_impl}: {parts}"


@functools.cache
def _say_once(text: str) -> None:
    """On rank 0. Megatron-LM parses its arguments up to three times."""
    if os.environ.get("RANK", "0") == "0":
        print(f"flux_megatron: {text}", flush=True)


@functools.cache
def _tell_at_exit() -> None:
    atexit.register(_tell)


def _tell() -> None:
    done = flux_megatron.report()
    _say_once(str(done) if done.total else "no call came to our layers, so nothing was overlapped")

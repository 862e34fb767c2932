"""What `--flux-overlap` does to a process: Megatron's models are made of our parts from then on."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
from typing import Any

from megatron.core.extensions import transformer_engine
from megatron.core.models import backends
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import transformer_block

import flux_megatron
from flux_megatron import settings
from flux_megatron.integration import effect, requirements
from flux_megatron.integration.attention import FluxCoreAttention
from flux_megatron.integration.flags import FluxOptions, options_from
from flux_megatron.integration.layers import FluxColumnParallelLinear
from flux_megatron.integration.norm import FluxNorm
from flux_megatron.integration.provider import FluxSpecProvider, StockSpecProvider
from flux_megatron.integration.selection import provider_of
from flux_megatron.integration.specs import use_flux_output_layer
from flux_megatron.integration.wgrad_module import provide_wgrad_kernels

_output_layer = contextlib.ExitStack()  # holds the replaced LM head in its place


def install_from(args: Any) -> None:
    """Do what Megatron's parsed arguments ask for; without `--flux-overlap` nothing.

    Call it before Megatron validates them, or at least before models are built; another call
    changes nothing more. `ValueError` for what cannot be had together.
    """
    options = options_from(args)
    if options is None:
        return
    requirements.check(args)
    install(options)
    # else all masks of causal layers are causal, and torch's flash attention need not read them
    FluxCoreAttention.reads_causal_masks = bool(getattr(args, "reset_attention_mask", False))
    if args.transformer_impl != "local":
        _say_once(_instead_of(args.transformer_impl))
        args.transformer_impl = "local"


def install(options: FluxOptions) -> None:
    """Settings, and our linears in the layers that were chosen, for models built after this."""
    os.environ.update(options.environment())
    settings.reload()
    FluxColumnParallelLinear.save_gathered = bool(options.save_gathered)
    build_from(provider_of(options.layers) if options.layers else FluxSpecProvider)
    effect.install(options.compare)
    _output_layer.close()
    if not options.layers or "head" in options.layers:
        _output_layer.enter_context(use_flux_output_layer())
    _tell_at_exit()


def build_from(provider: type[StockSpecProvider]) -> None:
    """Make Megatron's local specifications of this provider's classes and of `FluxNorm`.

    Linear layers that stay stock can then fuse their weight gradients without apex.
    """
    backends.LocalSpecProvider = gpt_layer_specs.LocalSpecProvider = provider
    gpt_layer_specs.LNImpl = transformer_block.LayerNormImpl = FluxNorm
    provide_wgrad_kernels()


def _instead_of(transformer_impl: str) -> str:
    attention = "TransformerEngine's" if transformer_engine.HAVE_TE else "torch's"
    return (
        f"--transformer-impl local, not {transformer_impl}: linear layers and norms are ours, "
        f"attention is {attention}"
    )


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

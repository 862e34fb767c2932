"""What `--flux-overlap` does to a process: from then on Megatron's models have our layers."""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Mapping
from typing import Any

from megatron.core.extensions import transformer_engine
from megatron.core.transformer import transformer_block

from flux_megatron import settings
from flux_megatron.integration import (
    autoload,
    building,
    checkpoint_arguments,
    experts,
    metrics,
    requirements,
    resolved,
)
from flux_megatron.integration.apex_shim import provide_wgrad_kernels
from flux_megatron.integration.arguments import Argument
from flux_megatron.integration.attention import FluxCoreAttention
from flux_megatron.integration.flags import FluxOptions, options_from
from flux_megatron.integration.layers import FluxColumnParallelLinear
from flux_megatron.integration.norm import FluxNorm
from flux_megatron.integration.provider import StockSpecProvider, te_can_run
from flux_megatron.integration.replaced import put, put_everywhere
from flux_megatron.overlap.report import report
from flux_megatron.versions.library import warn_of_untested
from flux_megatron.versions.megatron_core import MEGATRON_CORE
from flux_megatron.versions.transformer_engine import TRANSFORMER_ENGINE


def install_from(args: Any, known: Mapping[str, Argument] | None = None) -> None:
    """Do what Megatron's parsed arguments ask for; without `--flux-overlap` nothing.

    Call it before Megatron validates them, or at least before models are built; another call
    changes nothing more. `known`: the arguments of Megatron's own parser, by default of one that is
    made anew. `ValueError` for arguments that it refuses.
    """
    if getattr(args, "flux_overlap", False) and args.flux_experts is None:
        args.flux_experts = settings.get().experts or None
    options = options_from(args)
    if options is None:
        return
    requirements.check(args, known)
    if requirements.overlaps_nothing(args):
        requirements.log_once(f"--flux-overlap: {requirements.NOTHING}")
    checkpoint_arguments.then(lambda args: install_from(args, known))
    resolved.resolve(args, options.environment())
    of_te = args.transformer_impl == "transformer_engine" and te_can_run()
    fp8 = getattr(args, "fp8", None) is not None
    install(options, of_te)
    # else all masks of causal layers are causal, and torch's flash attention need not read them
    FluxCoreAttention.reads_causal_masks = bool(getattr(args, "reset_attention_mask", False))
    built = _what_is_built(args.transformer_impl, of_te, options.layers, fp8)
    requirements.log_once(built, about="layers")
    if not of_te:  # a second parse must find `local` too
        args.transformer_impl = "local"


def install(options: FluxOptions, of_te: bool = False) -> None:
    """Apply the options: settings, and our linears in the chosen layers of models built after this.

    `of_te`: Megatron builds Transformer Engine's specification, which has to be usable, else its
    local one, with norms and attention of ours.
    """
    warn_of_untested(MEGATRON_CORE, *([TRANSFORMER_ENGINE] if of_te else []))
    with building.until_stopped() as undo:
        os.environ.update(options.environment())
        settings.reload()
        FluxColumnParallelLinear.save_gathered = bool(options.save_gathered)
        if options.experts:
            experts.use(undo)
        if of_te:
            provide_wgrad_kernels()
        else:
            build_from(StockSpecProvider)
            undo.enter_context(building.norms())
        undo.enter_context(building.linears(options.layers, experts=not of_te))
        metrics.install(options.compare, options.layers)
    log_at_exit()


def build_from(provider: type[StockSpecProvider]) -> None:
    """Make Megatron's local specifications of this provider's classes, final norms too.

    Linear layers that stay stock can then fuse their weight gradients without apex.
    """
    put_everywhere("LocalSpecProvider", provider)
    put_everywhere("LNImpl", FluxNorm)
    # the final norm where all layers are alike: in Megatron it does not depend on their kind
    final = transformer_engine.TENorm if te_can_run() else FluxNorm
    put(transformer_block, "LayerNormImpl", final)
    provide_wgrad_kernels()


def _what_is_built(
    requested: str, of_te: bool, layers: tuple[str, ...] | None, fp8: bool = False
) -> str:
    chosen = f" ({' '.join(layers)})" if layers else ""
    if fp8:
        return (
            f"--transformer-impl {requested}: linear layers{chosen} are TransformerEngine's, with "
            "our operations in place of its userbuffers"
        )
    if of_te:
        return (
            f"--transformer-impl {requested}: linear layers{chosen} are ours, with the "
            "norms inside them; experts and all else are TransformerEngine's"
        )
    impl = "local" if requested == "local" else f"local, not {requested}"
    attention = "TransformerEngine's" if te_can_run() else "torch's"
    return (
        f"--transformer-impl {impl}: linear layers{chosen} and norms are ours, "
        f"attention is {attention}"
    )


@functools.cache
def log_at_exit() -> None:
    atexit.register(_log_calls, os.getpid())


def _log_calls(process: int) -> None:
    """Of a fork what it did itself; nothing of a program that an error has ended before."""
    done = report()
    if done.total:
        requirements.log_once(str(done), about="calls")
    elif os.getpid() == process and not autoload.failed():
        nothing = "no call came to our layers, so nothing was overlapped"
        requirements.log_once(nothing, about="calls")

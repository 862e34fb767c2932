"""What cannot be had together with `--flux-overlap`, said by name before a run starts.

Not here: what only costs the overlap, such as a tensor-parallel group that spans nodes. Such calls
run without it, are counted and say why, or fail under `--flux-strict`.
"""

from __future__ import annotations

from typing import Any

from megatron.core.extensions import transformer_engine

from flux_megatron.integration.provider import te_can_run

OUR_SPEC = ["flux_megatron.specs", "flux_layer_spec"]
_TE_ALONE = "only TransformerEngine's linear layers do it"
_OWN_LAYERS = "such models are built of other layers than those we replace"

# flags of Megatron, and why they are refused
REFUSED = {
    "--yaml-cfg": "it replaces all arguments, ours too",
    "--tp-comm-overlap": "TransformerEngine would overlap the same layers",
    "--fp8-format": _TE_ALONE,
    "--fp4-format": _TE_ALONE,
    "--kitchen-config-file": "Kitchen replaces the same layers",
    "--kitchen-recipe-number": "Kitchen replaces the same layers",
    "--delay-wgrad-compute": _TE_ALONE,
    "--fine-grained-activation-offloading": (
        "Megatron wants --transformer-impl transformer_engine with it"
    ),
    "--use-te-activation-func": _TE_ALONE,
    "--use-transformer-engine-op-fuser": _TE_ALONE,
    "--use-grouped-gemm-for-dense-mlp": _TE_ALONE,
    "--external-cuda-graph": _TE_ALONE,
    "--use-legacy-models": _OWN_LAYERS,
    "--experimental-attention-variant": _OWN_LAYERS,
    "--heterogeneous-layers-config-path": _OWN_LAYERS,
    "--heterogeneous-layers-config-encoded-json": _OWN_LAYERS,
    "--modelopt-enabled": _OWN_LAYERS,
    "--mla-down-proj-fusion": "its projection takes listed classes only",
    "--use-torch-fsdp2": "its weights are no plain tensors",
}


def check(args: Any) -> None:
    """`ValueError` that lists everything in Megatron's arguments which we cannot go with."""
    found = complaints(args)
    if found:
        raise ValueError("--flux-overlap cannot go with:\n" + "\n".join(f"  {c}" for c in found))


def complaints(args: Any) -> list[str]:
    """Each as `flag: reason`. A version of Megatron that lacks an argument cannot ask for it."""

    def value(name: str) -> Any:
        return getattr(args, name, None)

    def given(flag: str) -> bool:
        return value(attribute(flag)) is not None and value(attribute(flag)) is not False

    found = [f"{flag}: {why}" for flag, why in REFUSED.items() if given(flag)]
    if value("transformer_impl") == "inference_optimized":
        found.append("--transformer-impl inference_optimized: it does not train")
    if value("cuda_graph_impl") == "transformer_engine":
        found.append(f"--cuda-graph-impl transformer_engine: {_TE_ALONE}")
    layers = value("flux_layers")
    of_te = value("transformer_impl") == "transformer_engine" and te_can_run()
    if value("multi_latent_attention") and not of_te:
        found.append("--multi-latent-attention: it needs TransformerEngine's layers")
    elif value("multi_latent_attention") and (not layers or "qkv" in layers):
        found.append(
            "--multi-latent-attention: its projections take listed classes only; "
            "--flux-layers without qkv can go with it"
        )
    if value("qk_l2_norm") and not (of_te or value("num_experts") or value("spec") == OUR_SPEC):
        found.append("--qk-l2-norm: Megatron drops it where its local layers are all alike")
    if value("position_embedding_type") == "relative":
        found.append(f"--position-embedding-type relative: {_TE_ALONE}")
    if value("spec") not in (None, OUR_SPEC):
        found.append(f"--spec {' '.join(args.spec)}: it says itself which layers are built")
    if (value("context_parallel_size") or 1) > 1 and not transformer_engine.HAVE_TE:
        found.append("--context-parallel-size: it needs TransformerEngine's attention")
    return found


def attribute(flag: str) -> str:
    """What Megatron's parser calls the value of a flag."""
    return flag.removeprefix("--").removesuffix("-format").replace("-", "_")

"""Functions of a source file as text: where they stand, and whether they are still the same."""

from __future__ import annotations

import ast
import hashlib
from dataclasses import dataclass

# What `integration` takes over, imitates or relies on; no version has all of it. Not the scripts
# and what they build models with: those are the user's own to change. Nor what adds arguments:
# `integration.arguments` looks at each of them.
RELIED_ON = {
    "megatron/core/extensions/transformer_engine.py": (
        "TEColumnParallelLinear",
        "TELayerNormColumnParallelLinear",
        "TERowParallelLinear",
    ),
    "megatron/core/extensions/transformer_engine_spec_provider.py": ("TESpecProvider",),
    "megatron/core/models/backends.py": ("LocalSpecProvider",),
    "megatron/core/models/gpt/gpt_layer_specs.py": (
        "get_gpt_decoder_block_spec",
        "get_gpt_decoder_layer_specs",
        "get_gpt_layer_local_spec",
        "get_gpt_layer_local_submodules",
        "get_gpt_layer_with_transformer_engine_spec",
        "get_gpt_layer_with_transformer_engine_submodules",
        "get_gpt_mtp_block_spec",
        "get_gpt_mtp_block_spec_for_backend",
        "get_mlp_module_spec_for_backend",
    ),
    "megatron/core/models/gpt/gpt_model.py": ("GPTModel.__init__",),
    "megatron/core/models/gpt/moe_module_specs.py": ("get_moe_module_spec_for_backend",),
    "megatron/core/tensor_parallel/layers.py": (
        "ColumnParallelLinear.__init__",
        "ColumnParallelLinear._forward_impl",
        "ColumnParallelLinear.forward",
        "LinearWithGradAccumulationAndAsyncCommunication",
        "RowParallelLinear.__init__",
        "RowParallelLinear._forward_impl",
        "RowParallelLinear.forward",
        "linear_with_frozen_weight",
        "linear_with_grad_accumulation_and_async_allreduce",
    ),
    "megatron/core/transformer/multi_token_prediction.py": ("get_mtp_layer_spec_for_backend",),
    "megatron/core/transformer/transformer_block.py": (
        "TransformerBlock._build_layers",
        "_get_block_submodules",
    ),
    "megatron/core/utils.py": ("drain_embedding_wgrad_compute",),
    "megatron/training/training.py": (
        "get_model",
        "save_checkpoint_and_time",
        "setup_model_and_optimizer",
        "train_step",
        "training_log",
    ),
}


@dataclass(frozen=True)
class Function:
    """A function or class: its first line, decorators included, and its text's hash."""

    first: int
    sha256: str


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def functions(source: str) -> dict[str, Function]:
    """The functions and classes of a module by their qualified names."""
    lines = source.split("\n")
    found: dict[str, Function] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            inside = prefix
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                first = min(part.lineno for part in (child, *child.decorator_list))
                text = "\n".join(lines[first - 1 : child.end_lineno])
                found[prefix + child.name] = Function(first, digest(text))
                inside = f"{prefix}{child.name}."
            visit(child, inside)

    visit(ast.parse(source), "")
    return found

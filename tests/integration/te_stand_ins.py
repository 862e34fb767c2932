"""Stand-ins for TransformerEngine's classes as Megatron wraps them, which compute on a CPU.

They have TransformerEngine's names, order and tags of parameters: test_te_specification.py holds
them against what was read in its source. What they compute is Megatron's own local layers', with a
norm before them.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from megatron.core import utils
from megatron.core.extensions import transformer_engine, transformer_engine_spec_provider
from megatron.core.models import backends
from megatron.core.models.gpt import gpt_layer_specs, moe_module_specs
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import (
    attention,
    multi_latent_attention,
    multi_token_prediction,
    transformer_block,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from packaging.version import Version
from torch.nn import Parameter

from flux_megatron.integration import building, install
from flux_megatron.integration.attention import FluxCoreAttention
from flux_megatron.integration.flags import add_flux_arguments
from flux_megatron.lab import reference

# main imports it later, and TransformerEngine itself with it if that is said to be there
with contextlib.suppress(ImportError):
    importlib.import_module("megatron.core.post_training.modelopt.layers")
VARIANTS = "megatron.core.models.gpt.experimental_attention_variant_module_specs"
with contextlib.suppress(ImportError):  # from 0.16 on
    importlib.import_module(VARIANTS)

VERSION = "2.11.0"  # of TransformerEngine, whose source was read


class _State:
    """As TransformerEngine 2.11 without FP8."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        assert state is None or state.numel() == 0, "only empty states are known here"


def _norm_parameters(config: Any, size: int, sequence_parallel: bool) -> dict[str, Parameter]:
    """TransformerEngine registers them in this order, and tags them so."""
    first = 0.0 if config.layernorm_zero_centered_gamma else 1.0
    made = {"weight": Parameter(torch.full((size,), first, dtype=config.params_dtype))}
    if config.normalization == "LayerNorm":
        made["bias"] = Parameter(torch.zeros(size, dtype=config.params_dtype))
    for parameter in made.values():
        parameter.sequence_parallel = sequence_parallel
    return made


def _normalised(x: Any, weight: Any, bias: Any, config: Any, eps: float) -> torch.Tensor:
    options = {"eps": eps, "zero_centered": config.layernorm_zero_centered_gamma}
    if bias is None:
        return reference.rms_norm(x, weight, **options)
    return reference.layer_norm(x, weight, bias, **options)


class TENorm(_State, torch.nn.Module):
    returns_residual = False

    def __init__(
        self, config: Any, hidden_size: int, eps: float = 1e-5, has_residual: bool = False
    ) -> None:
        super().__init__()
        assert config.normalization in ("LayerNorm", "RMSNorm")
        self.config, self.eps = config, eps
        for name, made in _norm_parameters(config, hidden_size, config.sequence_parallel).items():
            self.register_parameter(name, made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _normalised(x, self.weight, getattr(self, "bias", None), self.config, self.eps)


class _Linear(_State):
    """Before one of Megatron's two layers: what TransformerEngine's lack is refused."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        for name in ("gather_output", "skip_weight_param_allocation"):
            if options.pop(name, False):
                raise ValueError(f"TransformerEngine's layers do not support {name}")
        if not options.get("input_is_parallel", True):
            raise ValueError("TransformerEngine's layers do not support input_is_parallel=False")
        given = copy.copy(config)
        given.gradient_accumulation_fusion = False  # else Megatron's layers ask for apex
        given.defer_embedding_wgrad_compute = False  # TransformerEngine's know nothing of it
        super().__init__(input_size, output_size, config=given, **options)
        self.config = given
        if not hasattr(self.weight, "tensor_model_parallel"):  # where nothing is initialised
            dim = int(isinstance(self, RowParallelLinear))
            set_tensor_model_parallel_attributes(self.weight, True, dim, 1)
        self.out_features, self.in_features = self.weight.shape  # of this rank
        self.te_return_bias = options["skip_bias_add"] and options["bias"]
        if not options["bias"]:  # a plain attribute
            del self._parameters["bias"]
            self.bias = torch.Tensor().to(config.params_dtype)
        self.is_first_microbatch = True

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.is_first_microbatch = False
        if "bias" in self._parameters:
            return super().forward(x)
        with mock.patch.dict(vars(self), bias=None):
            return super().forward(x)


class TEColumnParallelLinear(_Linear, ColumnParallelLinear):
    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options)


class TERowParallelLinear(_Linear, RowParallelLinear):
    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options)


class TELayerNormColumnParallelLinear(TEColumnParallelLinear):
    def __init__(self, input_size: int, output_size: int, **options: Any) -> None:
        if options["is_expert"]:
            raise ValueError("TransformerEngine's layers do not support is_expert with a norm")
        super().__init__(input_size, output_size, **options)
        parts = _norm_parameters(self.config, input_size, self.sequence_parallel)
        self._parameters = {
            **{f"layer_norm_{name}": parameter for name, parameter in parts.items()},
            **self._parameters,
        }

    return_layernorm_output = return_layernorm_output_gathered = False

    def forward(self, x: torch.Tensor) -> tuple[Any, torch.Tensor | None]:
        bias = getattr(self, "layer_norm_bias", None)
        eps = self.config.layernorm_epsilon
        x = _normalised(x, self.layer_norm_weight, bias, self.config, eps)
        y, bias = super().forward(x)
        if self.return_layernorm_output_gathered and self.sequence_parallel:
            x = gather_from_sequence_parallel_region(x)
        return ((y, x) if self.return_layernorm_output else y), bias


def _whole_in_checkpoints(
    self: Any, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None
) -> dict:
    state = self.state_dict(prefix="", keep_vars=True)
    return make_sharded_tensors_for_checkpoint(state, prefix, None, sharded_offsets)


class TELinear(_State, torch.nn.Module):
    """Whole on each rank of the tensor-parallel group, which is how Megatron uses it by itself."""

    def __init__(
        self, input_size: int, output_size: int, *, parallel_mode: str | None, config: Any,
        init_method: Any, bias: bool, skip_bias_add: bool, skip_weight_param_allocation: bool,
        tp_comm_buffer_name: str | None = None, is_expert: bool = False, tp_group: Any = None,
        **_: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        assert parallel_mode == "duplicated"
        assert tp_group is None
        assert not skip_weight_param_allocation
        self.parallel_mode = None
        self.te_return_bias = skip_bias_add and bias
        self.weight = Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        if config.perform_initialization:
            with get_cuda_rng_tracker().fork("data-parallel-rng"):
                init_method(self.weight)
        self.register_parameter("bias", None)
        if bias:
            self.bias = Parameter(torch.zeros(output_size, dtype=config.params_dtype))
        for parameter in self.parameters():
            parameter.allreduce = True
            parameter.sequence_parallel = config.sequence_parallel
        # as TransformerEngine tags every weight, though this one is whole
        self.weight.tensor_model_parallel = True
        self.weight.partition_dim, self.weight.partition_stride = 0, 1

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.te_return_bias:
            return F.linear(x, self.weight), self.bias
        return F.linear(x, self.weight, self.bias), None

    sharded_state_dict = _whole_in_checkpoints


class TEDotProductAttention(_State, FluxCoreAttention):
    """Ours, without the arguments that it does not take."""

    reads_causal_masks = False
    sharded_state_dict = _whole_in_checkpoints  # with its state

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str,
        attention_dropout: float | None = None, softmax_scale: float | None = None, **_: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            config, layer_number, attn_mask_type, attention_type, attention_dropout, softmax_scale
        )


STAND_INS = {
    each.__name__: each
    for each in (
        TENorm, TELinear, TEColumnParallelLinear, TERowParallelLinear, TEDotProductAttention,
        TELayerNormColumnParallelLinear,
    )
}  # fmt: skip
STACKS = ("megatron.core.ssm.mamba_block", "megatron.core.models.hybrid.hybrid_block")
THEIRS = transformer_engine_spec_provider.TESpecProvider
# whoever imports the provider if it finds TransformerEngine, and its norm beside it
USERS = (
    transformer_engine_spec_provider, gpt_layer_specs, moe_module_specs, multi_token_prediction,
    *(sys.modules[name] for name in (VARIANTS,) if name in sys.modules),
)  # fmt: skip


def pretend_te() -> None:
    """In this process megatron-core finds TransformerEngine, but for what only a GPU can do.

    Called again, it takes back what `overlap` put in the place of Megatron's layers.
    """
    building.stop()
    for module in (transformer_engine, transformer_engine_spec_provider, backends, attention,
                   multi_latent_attention, multi_token_prediction, transformer_block,
                   gpt_layer_specs, *(sys.modules[name] for name in STACKS if name in sys.modules)
                   ):  # fmt: skip
        for name, stand_in in STAND_INS.items():
            if hasattr(module, name):
                setattr(module, name, stand_in)
    for module in USERS:
        module.TESpecProvider = THEIRS
    gpt_layer_specs.TENorm = TENorm
    transformer_block.LayerNormImpl = TENorm
    for module in (transformer_engine, gpt_layer_specs, multi_token_prediction):
        module.HAVE_TE = True
    utils.get_te_version = lambda: Version(VERSION)
    transformer_engine_spec_provider.is_te_min_version = utils.is_te_min_version
    # main asks what is of these classes, which are not built in training
    inference = vars(sys.modules.get("megatron.core.tensor_parallel.inference_layers", utils))
    for name in [name for name in inference if name.startswith("Inference")]:
        inference[name] = type(name, (), {})
    experts = sys.modules["megatron.core.transformer.moe.moe_utils"]
    experts.te_general_gemm = None  # up to 0.16 asked for also where there is none


@contextlib.contextmanager
def with_gpu() -> Iterator[None]:
    """Inside, `te_can_run()` finds a GPU; checkpoints are to be written outside."""
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        yield


def overlap(*flags: str, transformer_impl: str = "transformer_engine") -> bool:
    """Installs us as a launch does that parses twice; whether Megatron is then to use
    TransformerEngine's specification.
    """
    args = add_flux_arguments(argparse.ArgumentParser()).parse_args(["--flux-overlap", *flags])
    args.transformer_impl = transformer_impl
    with with_gpu():
        for _ in range(2):  # the second time with what the first one left
            install.install_from(args)
    return args.transformer_impl == "transformer_engine"

"""A short run of a tiny GPT as Megatron's own loop trains it, on our layers or on stock ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import side_by_side as sbs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import Float16Module

from flux_megatron.integration import building
from flux_megatron.integration.delayed_wgrad import DelayedWgrad
from flux_megatron.integration.provider import StockSpecProvider
from flux_megatron.lab.train.model import layer_context
from flux_megatron.lab.train.specs import gpt_block_spec, local_spec

VOCAB, SEQUENCE, BATCH, HIDDEN, STEPS = 64, 16, 2, 32, 3


@dataclass(frozen=True)
class Feature:
    """One way to train: what it sets beside a plain run, and how its linear layers run then.
    `only_ours` is set with our layers alone, for what Megatron's local ones cannot do; `unchecked`
    also, but behind the configuration's own checks.

    `lengths` are the sequence lengths of the steps, in turn. `prepare` changes a model that was
    just built; `around` is entered for the steps. `runs` is "overlapped", or part of the reason why
    calls are not. The `quick` ones are tested always.
    """

    config: dict[str, Any] = field(default_factory=dict)
    only_ours: dict[str, Any] = field(default_factory=dict)
    unchecked: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    tp: int = 2
    pp: int = 1
    vp: int | None = None
    dp: int = 1
    cp: int = 1
    sp: bool = True
    dtype: torch.dtype = torch.float32
    steps: int = STEPS
    microbatches: int = 1
    lengths: tuple[int, ...] = (SEQUENCE,)
    prepare: Callable[[GPTModel], None] = lambda model: None
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    runs: str = "overlapped"
    quick: bool = False

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def low_precision(self) -> bool:
        return self.dtype != torch.float32


class Training:
    """This rank's part of a run. It replaces Megatron's process groups."""

    def __init__(self, feature: Feature, layers: str) -> None:
        """`layers`: flux, stock, or stock with its sums in another order (stock-...)."""
        experts = {k: v for k, v in feature.config.items() if k.startswith("expert_")}
        sbs.start(
            feature.tp, pipeline_model_parallel_size=feature.pp,
            virtual_pipeline_model_parallel_size=feature.vp, context_parallel_size=feature.cp,
            **experts,
        )  # fmt: skip
        self.feature, self.layers, self.done = feature, layers, 0
        self.grad_norm: float | None = None  # of the last step
        self.config = _config(feature, layers)
        self.modules = [self._model(stage) for stage in range(feature.vp or 1)]
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **feature.ddp)
        self.chunks = [self._wrapped(module, ddp) for module in self.modules]
        self.optimizer = self._optimizer(ddp)
        self._let_the_schedule_synchronise(ddp)

    def _model(self, stage: int) -> GPTModel:
        sbs.seed()
        vp_stage = stage if self.feature.vp else None
        place = {"ignore_virtual": False, "vp_stage": vp_stage}
        spec, mtp = self.specifications(vp_stage)
        with self._linears():
            model = GPTModel(
                config=self.config, transformer_layer_spec=spec, mtp_block_spec=mtp,
                vocab_size=VOCAB, max_sequence_length=max(self.feature.lengths), vp_stage=vp_stage,
                pre_process=parallel_state.is_pipeline_first_stage(**place),
                post_process=parallel_state.is_pipeline_last_stage(**place),
                position_embedding_type="rope", **self.feature.model,
            )  # fmt: skip
        self.feature.prepare(model)
        return model

    def specifications(self, vp_stage: int | None) -> tuple[Any, Any]:
        """Of the decoder and of multi-token prediction."""
        with self._attention():
            spec = gpt_block_spec(self.config, vp_stage)
        with self._attention(), local_spec():
            return spec, get_gpt_mtp_block_spec(self.config, spec, False, vp_stage)

    @contextlib.contextmanager
    def _linears(self) -> Iterator[None]:
        """Ours delay weight gradients as TransformerEngine's layers, which an LM head is not."""
        if self.layers != "flux":
            yield
            return
        delays = property(lambda layer: layer.output_size != VOCAB)
        with building.linears(experts=True), mock.patch.object(DelayedWgrad, "delays", delays):
            yield

    def _attention(self) -> contextlib.AbstractContextManager[Any]:
        """Megatron's own attention does no context parallelism."""
        if self.feature.cp == 1:
            return contextlib.nullcontext()
        return mock.patch.object(StockSpecProvider, "core_attention", return_value=ContextAttention)

    def _wrapped(self, module: GPTModel, ddp: DistributedDataParallelConfig) -> Any:
        inner = Float16Module(self.config, module) if self.feature.low_precision else module
        later = bool(module.vp_stage)
        return DistributedDataParallel(self.config, ddp, inner, disable_bucketing=later)

    def _optimizer(self, ddp: DistributedDataParallelConfig) -> MegatronOptimizer:
        settings = OptimizerConfig(
            optimizer="adam", lr=1e-2, weight_decay=0.1, clip_grad=1.0,
            adam_eps=1e-4,  # what is zero but for rounding must not become a step
            params_dtype=self.feature.dtype, bf16=self.config.bf16, fp16=self.config.fp16,
            initial_loss_scale=2.0**12, use_distributed_optimizer=ddp.use_distributed_optimizer,
            overlap_param_gather=ddp.overlap_param_gather,
        )  # fmt: skip
        return get_megatron_optimizer(settings, self.chunks)

    def _let_the_schedule_synchronise(self, ddp: DistributedDataParallelConfig) -> None:
        def of_chunks(name: str) -> Any:
            functions = [getattr(chunk, name) for chunk in self.chunks]
            return functions if len(functions) > 1 else functions[0]

        if ddp.overlap_grad_reduce:
            self.config.no_sync_func = of_chunks("no_sync")
        if ddp.overlap_param_gather and ddp.align_param_gather:
            self.config.param_sync_func = of_chunks("start_param_sync")
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss

    def run(self, steps: int) -> list[float]:
        """The losses of the next steps; none on other ranks than those of the last stage."""
        with self.feature.around(), layer_context(self):  # asks for our `layers`
            return [loss for _ in range(steps) for loss in self._one_step()]

    def _one_step(self) -> list[float]:
        feature = self.feature
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        length = feature.lengths[self.done % len(feature.lengths)]
        parts = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=[_batches(self.done, length, feature.microbatches) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=feature.microbatches,
            seq_length=length,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        _, self.grad_norm, _ = self.optimizer.step()
        self.done += 1
        if not parts:
            return []
        loss = torch.stack([part["loss"] for part in parts]).mean() / feature.dp
        dist.all_reduce(loss, group=parallel_state.get_data_parallel_group())
        return [loss.item()]

    def weights(self) -> dict[str, torch.Tensor]:
        """Copies; the same names with either layers."""
        if self.chunks[0].ddp_config.overlap_param_gather:  # else the next forward brings them
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)
        return {
            f"chunk {number}: {name}": parameter.detach().clone()
            for number, module in enumerate(self.modules)
            for name, parameter in module.named_parameters()
        }


def _config(feature: Feature, layers: str) -> Any:
    defaults = {
        "num_layers": 2, "hidden_size": HIDDEN, "ffn_hidden_size": 2 * HIDDEN,
        "pipeline_model_parallel_size": feature.pp, "fp16": feature.dtype == torch.float16,
        "virtual_pipeline_model_parallel_size": feature.vp, "context_parallel_size": feature.cp,
    }  # fmt: skip
    options = {**defaults, **feature.config, **(feature.only_ours if layers == "flux" else {})}
    config = sbs.settings(feature.tp, feature.sp, feature.dtype, **options)
    for name, value in feature.unchecked.items() if layers == "flux" else ():
        assert hasattr(config, name), name
        setattr(config, name, value)
    return config


def positions_here(length: int, rank: int | None = None) -> torch.Tensor:
    """Where this rank's tokens stand in the sequence: as Megatron has it, each rank has a chunk of
    the first half and its mirror image.
    """
    ranks = parallel_state.get_context_parallel_world_size()
    rank = parallel_state.get_context_parallel_rank() if rank is None else rank
    if ranks == 1:
        return torch.arange(length)
    chunks = torch.arange(length).chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


class ContextAttention(torch.nn.Module):
    """For TransformerEngine's, which alone does context parallelism: ranks gather all keys."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        group = parallel_state.get_context_parallel_group()
        length = len(query) * group.size()
        key, value = (gather_from_sequence_parallel_region(t, group=group) for t in (key, value))
        theirs = torch.cat([positions_here(length, rank) for rank in range(group.size())])
        allowed = theirs <= positions_here(length)[:, None]
        context = F.scaled_dot_product_attention(
            *(t.permute(1, 2, 0, 3) for t in (query, key, value)), allowed, enable_gqa=True
        )
        return context.permute(2, 0, 1, 3).flatten(2)


def _batches(step: int, length: int, microbatches: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Arithmetic sequences, learnable in a few steps.

    The data-parallel ranks share what one rank alone would be given.
    """
    rank, ranks = (
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
    )
    mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
    for microbatch in range(microbatches):
        generator = torch.Generator().manual_seed(100 * step + microbatch * ranks + rank)
        first = torch.randint(0, VOCAB, (BATCH, 1), generator=generator)
        tokens = (first + 3 * torch.arange(length + 1)) % VOCAB
        positions = torch.arange(length).repeat(BATCH, 1)
        whole = (tokens[:, :-1], positions, tokens[:, 1:])
        here = (part[:, positions_here(length)].contiguous() for part in whole)
        inputs, positions, labels = here
        yield inputs, positions, mask, labels


def _forward_step(batches: Any, model: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
    *inputs, labels = next(batches)

    def mean(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = losses.float().mean()
        return loss, {"loss": loss.detach().clone()}

    run = model.build_schedule_plan if return_schedule_plan else model
    return run(*inputs, labels=labels), mean

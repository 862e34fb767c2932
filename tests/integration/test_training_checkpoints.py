"""Distributed checkpoints: what our layers saved stock ones load, and the reverse, over other ranks
too; training goes on as if nothing had happened.

The quick part is tested always, all of it with FLUX_MEGATRON_ALL_FEATURES=1. Then come layers of
TransformerEngine, which is not here (te_stand_ins.py), in every format of Megatron: the distributed
optimizer's state has places there, not names.
"""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("pydantic", reason="needs the extra `train`")
pytest.importorskip("psutil", reason="without it Megatron waits for writers that died")

import numpy
import te_stand_ins as te
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from ranks import run_ranks
from training_cases import ALL, FOUR_LAYERS, FUSION, LLAMA, OVERLAP, QUICKEST, TIED, ZERO
from training_run import Feature, Training

from flux_megatron.integration import stand_ins
from flux_megatron.integration.apex_shim import provide_wgrad_kernels
from flux_megatron.versions.megatron_core import MEGATRON_CORE

STEPS = 2
LEGACY = "torch"
Side = tuple[str, Feature]


@dataclass(frozen=True)
class Move:
    """`source` (layers, feature) trains and saves, `target` loads and trains.

    `at_once`: the source waits for the writers; else it trains on beside them. `formats`: how the
    distributed optimizer's state is sharded, or `LEGACY`: files of each rank, without
    dist_checkpointing. The source saves in all of them, and the target goes on from each.
    """

    source: Side
    target: Side
    at_once: bool = True
    formats: tuple[str, ...] = ("fully_reshardable",)
    quick: bool = False
    training: type[Training] = Training

    @property
    def keeps_layout(self) -> bool:
        return self.source[1] == self.target[1]


@dataclass(frozen=True)
class Step:
    """What Megatron logs of one; no loss on other ranks than those of the last stage."""

    losses: list[float]
    grad_norm: float
    params_norm: float

    def apart(self, other: Step) -> float:
        """The largest difference: of losses absolute, of norms relative."""
        losses = [abs(a - b) for a, b in zip(self.losses, other.losses, strict=True)]
        norms = ((self.grad_norm, other.grad_norm), (self.params_norm, other.params_norm))
        return worst([*losses, *(abs(a - b) / a for a, b in norms)])


class TrainingOfTE(Training):
    """`layers`: stock, or flux as `--flux-overlap` puts them into a launch."""

    def __init__(self, feature: Feature, layers: str) -> None:
        te.pretend_te()
        provide_wgrad_kernels()  # stock has apex's
        self.use_te = te.overlap() if layers == "flux" else True
        super().__init__(feature, layers)
        linear = type(self.modules[0].decoder.layers[0].mlp.linear_fc1)
        ours = stand_ins.TELayerNormColumnParallelLinear
        assert linear is (ours if layers == "flux" else te.TELayerNormColumnParallelLinear)

    def specifications(self, vp_stage: int | None) -> tuple[Any, Any]:
        config = self.config
        spec = gpt_layer_specs.get_gpt_decoder_block_spec(
            config, self.use_te, config.normalization, vp_stage=vp_stage
        )
        return spec, gpt_layer_specs.get_gpt_mtp_block_spec(config, spec, self.use_te, vp_stage)


TOLERANCE = 1e-5  # docs/tests.md

TWO = Feature(config=LLAMA)
STAGES = Feature(config=LLAMA, pp=2, microbatches=2)
FOUR = Feature(config=LLAMA, tp=4, microbatches=2)
SHARDED = Feature(config=LLAMA, dp=2, ddp=OVERLAP)
FOUR_SHARDED = replace(FOUR, ddp=OVERLAP)
INTERLEAVED = Feature(config=FOUR_LAYERS, model=TIED, pp=2, vp=2, microbatches=2)
BF16 = Feature(config=LLAMA, dtype=torch.bfloat16)
MOVES = {
    "flux to stock": Move(("flux", TWO), ("stock", TWO), quick=True),
    "stock to flux": Move(("stock", TWO), ("flux", TWO)),
    "asynchronous, stock to flux": Move(("stock", TWO), ("flux", TWO), at_once=False, quick=True),
    "asynchronous, flux to stock": Move(("flux", TWO), ("stock", TWO), at_once=False),
    "TP 2 x PP 2 to TP 4": Move(("flux", STAGES), ("stock", FOUR), quick=True),
    "TP 4 to TP 2 x PP 2": Move(("stock", FOUR), ("flux", STAGES), quick=True),
    "TP 2 x DP 2 to TP 4": Move(("stock", SHARDED), ("flux", FOUR_SHARDED)),
    "TP 4 to TP 2 x DP 2": Move(("flux", FOUR_SHARDED), ("stock", SHARDED), at_once=False),
    "distributed optimizer": Move(
        ("flux", SHARDED), ("stock", SHARDED), formats=("dp_reshardable",)
    ),
    "interleaved stages": Move(("flux", INTERLEAVED), ("stock", INTERLEAVED)),
    "bf16, flux to stock": Move(("flux", BF16), ("stock", BF16)),
    "bf16, stock to flux": Move(("stock", BF16), ("flux", BF16)),
}  # fmt: skip
FUSED = Feature(config={**LLAMA, **FUSION}, dp=2, ddp=OVERLAP)
BIASES = Feature(config={"qk_layernorm": True}, dp=2, ddp=ZERO)
FUSED_FOUR = replace(FUSED, tp=4, dp=1, microbatches=2)
# Of the optimizer's state: by place, and by parameter. Before 0.16 stock layers save none by place
# with torch's Adam, whose steps are tensors; the last format, which only they write, takes NumPy 1.
BY_PLACE = "dp_reshardable"
ANY_RANKS = ["fully_reshardable"] if MEGATRON_CORE.since("0.15") else []
if hasattr(numpy, "product") and not MEGATRON_CORE.since("0.16"):
    ANY_RANKS += ["fully_sharded_model_space"]
BY_PLACES = [BY_PLACE] if MEGATRON_CORE.since("0.16") else []
for one, other in (("stock", "flux"), ("flux", "stock")):
    for what, source, target, formats in (
        ("", FUSED, FUSED, [*BY_PLACES, LEGACY, *ANY_RANKS]),
        (", biases and norms of queries", BIASES, BIASES, BY_PLACES),
        (", more ranks", FUSED, FUSED_FOUR, ANY_RANKS),
    ):
        if formats:
            MOVES[f"TransformerEngine, {one} to {other}{what}"] = Move(
                (one, source), (other, target), formats=(*formats,), quick=True,
                training=TrainingOfTE,
            )  # fmt: skip


@pytest.mark.parametrize("name", [n for n, move in MOVES.items() if ALL or move.quick])
def test_training_goes_on(name, tmp_path):
    move = MOVES[name]
    # in bf16 other layers round otherwise; that what they start from is the same was seen
    tolerance = 1e-2 if move.source[1].low_precision else TOLERANCE
    found = differences(move, tmp_path)
    assert {how: apart for how, apart in found.items() if not apart <= tolerance} == {}


def test_a_lost_state_is_seen(tmp_path):
    move = Move(("stock", TWO), ("stock", TWO))
    (apart,) = differences(move, tmp_path, forget="exp_avg").values()
    assert apart > TOLERANCE


def worst(found: list[float]) -> float:
    """The largest, or NaN if there is one."""
    return float(torch.tensor(found, dtype=torch.float64).max())


def differences(move: Move, folder: Path, **options: Any) -> dict[str, float]:
    """Between the next steps, without and with a checkpoint in between, of each format."""
    results = run_ranks(
        _move, move.source[1].world_size, move, folder, options,
        environment={"FLUX_MEGATRON_STRATEGY": QUICKEST},
    )  # fmt: skip
    went_on, *goes_on = (
        next(steps for steps in parts if steps[0].losses) for parts in zip(*results, strict=True)
    )
    return {
        how: worst([a.apart(b) for a, b in zip(went_on, steps, strict=True)])
        for how, steps in zip(move.formats, goes_on, strict=True)
    }


def _move(rank: int, move: Move, folder: Path, options: dict) -> list[list[Step]]:
    """The next steps of the source, and of the target from each format."""
    layers, feature = move.source
    source = move.training(feature, layers)
    source.run(STEPS)
    left = _state(source)
    with contextlib.ExitStack() as saved:
        for how in move.formats:
            (folder / how).mkdir(exist_ok=True)
            saved.enter_context(_saved(source, how, str(folder / how), move.at_once))
        found = [_steps(source)]
    layers, feature = move.target
    target = move.training(feature, layers)
    for how in move.formats:
        _load(target, how, str(folder / how), **options)
        if move.keeps_layout and not options:
            loaded = _state(target)
            assert loaded.keys() == left.keys()
            assert not [name for name in left if not torch.equal(loaded[name], left[name])]
        found.append(_steps(target))
    return found


def _steps(training: Training) -> list[Step]:
    return [
        Step(training.run(1), float(training.grad_norm or 0), _params_norm(training))
        for _ in range(STEPS)
    ]


def _params_norm(training: Training) -> float:
    """Over the whole model, as Megatron logs it."""
    training.weights()  # brings those that the next forward would bring
    squares = torch.zeros(())
    for parameter in (p for module in training.modules for p in module.parameters()):
        if param_is_not_tensor_parallel_duplicate(parameter):
            squares += parameter.detach().float().square().sum()
    dist.all_reduce(squares, group=parallel_state.get_model_parallel_group())
    return float(squares.sqrt())


def _state(training: Training) -> dict[str, torch.Tensor]:
    """This rank's weights, and what its optimizer keeps for them."""
    state = training.weights()
    for a, part in enumerate(training.optimizer.chained_optimizers):
        groups = part.optimizer.param_groups
        for b, kept in enumerate(parameter for group in groups for parameter in group["params"]):
            state[f"optimizer {a}, main weight {b}"] = kept.detach().clone()
            for name, value in part.optimizer.state[kept].items():
                state[f"optimizer {a}, {name} {b}"] = torch.as_tensor(value).clone()
    return state


def _sharded(training: Training, how: str, is_loading: bool) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": how, "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }  # fmt: skip
    state = {
        f"model{number}" if len(training.modules) > 1 else "model": module.sharded_state_dict(
            metadata=metadata
        )
        for number, module in enumerate(training.modules)
    }
    state["optimizer"] = training.optimizer.sharded_state_dict(
        state if len(state) > 1 else state["model"], is_loading=is_loading, metadata=metadata
    )
    state["step"] = training.done
    return state


@contextlib.contextmanager
def _saved(training: Training, how: str, folder: str, at_once: bool) -> Iterator[None]:
    """Around the steps that come after saving."""
    if how == LEGACY:
        _save_files(training, folder)
        yield
        return
    multiprocessing.current_process()._config["daemon"] = False  # megatron-core starts processes
    # it would spawn this one, and import everything anew
    answers = multiprocessing.get_context("fork").Manager()
    filesystem_async._results_queue = answers.Queue()
    writing = AsyncCallsQueue()
    more = {} if at_once else {"async_sharded_save": True}
    if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
        more["async_strategy"] = "mcore"  # its other one needs nvidia-resiliency-ext
    request = dist_checkpointing.save(_sharded(training, how, False), folder, **more)
    if request is not None:
        writing.schedule_async_request(request)
    yield
    writing.maybe_finalize_async_calls(blocking=True)
    dist.barrier()
    answers.shutdown()


def _save_files(training: Training, folder: str) -> None:
    """As `--ckpt-format torch`, for models of one stage: a file of each rank, and one of each
    data-parallel group with what its optimizer keeps.
    """
    (module,) = training.modules
    state = {"model": module.state_dict_for_save_checkpoint(), "step": training.done}
    state["optimizer"] = training.optimizer.state_dict()
    torch.save(state, _file(folder, "rank", dist.get_rank()))
    training.optimizer.save_parameter_state(_state_file(folder))
    dist.barrier()


def _state_file(folder: str) -> str:
    return _file(folder, "optimizer", parallel_state.get_tensor_model_parallel_rank())


def _file(folder: str, name: str, number: int) -> str:
    return str(Path(folder) / f"{name}-{number}.pt")


def _load(training: Training, how: str, folder: str, forget: str = "") -> None:
    if training.chunks[0].ddp_config.use_distributed_optimizer:
        training.run(1)  # without apex Megatron cannot describe one that never stepped
    for parameter in (p for module in training.modules for p in module.parameters()):
        parameter.data.fill_(torch.nan)
    if how == LEGACY:
        state = torch.load(_file(folder, "rank", dist.get_rank()), weights_only=False)
    else:
        state = dist_checkpointing.load(_sharded(training, how, True), folder)
    for number, module in enumerate(training.modules):
        module.load_state_dict(state[f"model{number}" if len(training.modules) > 1 else "model"])
    with _adam_of_torch():
        training.optimizer.load_state_dict(state["optimizer"])
        if how == LEGACY:
            training.optimizer.load_parameter_state(_state_file(folder))
    for part in training.optimizer.chained_optimizers:
        for kept in part.optimizer.state.values():
            kept["step"] = kept["step"].clone()  # Megatron gives all weights one tensor
            if forget:
                kept[forget].zero_()
    training.done = state["step"]


@contextlib.contextmanager
def _adam_of_torch() -> Iterator[None]:
    """The distributed optimizer loads what apex's Adam keeps for a weight; torch's keeps its step
    there too, which Megatron has restored by then.
    """
    name = "_set_main_param_and_optimizer_states"
    load = getattr(DistributedOptimizer, name)

    @torch.no_grad()
    def load_but_step(self, weight, tensors):
        group, place = self.model_param_group_index_map[weight]
        kept = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
        load(self, weight, {**tensors, "step": kept["step"]})

    with mock.patch.object(DistributedOptimizer, name, load_but_step):
        yield

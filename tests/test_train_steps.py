"""What a run's configuration asks for reaches the optimizer, and what a step and a stop do."""

from __future__ import annotations

import math
import signal
from types import SimpleNamespace

import pytest

pytest.importorskip("megatron.core", reason="needs the extra `train`")

import torch
from megatron.core import parallel_state
from ranks import on_cpu_ranks, run_ranks

from flux_megatron.integration.cpu_device import pretend_cuda
from flux_megatron.lab.train import loop
from flux_megatron.lab.train.config import TrainConfig
from flux_megatron.lab.train.model import Trainee, transformer_config

MODEL = {"num_layers": 2, "hidden": 32, "heads": 4, "ffn": 48, "seq_length": 24}
LOOP = {
    "steps": 9, "micro_batch": 1, "global_batch": 2, "lr": 0.02, "min_lr": 0.004,
    "warmup_steps": 2, "decay_steps": 6, "weight_decay": 0.3, "clip": 0.7,
}  # fmt: skip


def config(model: dict | None = None, **train: object) -> TrainConfig:
    sections = {"model": MODEL | (model or {}), "parallel": {"tp": 1}, "train": LOOP | train}
    return TrainConfig.model_validate(sections)


def schedules(rank: int) -> dict[str, list[tuple[float, float]]]:
    """Learning rate and weight decay of each step, after what the optimizer was told."""
    pretend_cuda()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
    found = {}
    for name, train in {"cosine": {}, "constant": {"decay_steps": None}}.items():
        wanted = config(**train)
        trainee = Trainee(wanted, torch.device("cpu"))
        told, loop = trainee.optimizer.config, wanted.train
        assert (told.lr, told.min_lr, told.weight_decay, told.clip_grad, told.params_dtype) == (
            loop.lr, loop.min_lr, loop.weight_decay, loop.clip, torch.float32
        )  # fmt: skip
        plan = trainee.scheduler
        assert (plan.max_lr, plan.min_lr) == (loop.lr, loop.min_lr)
        found[name] = []
        for _ in range(loop.steps):
            trainee.scheduler.step(1)
            decays = {g["weight_decay"] for g in trainee.optimizer.param_groups if g["wd_mult"]}
            found[name].append((trainee.learning_rate(), *decays))
    for tied, position in ((True, "learned_absolute"), (False, "rope")):
        given = {"tied_embeddings": tied, "position_embedding": position}
        module = Trainee(config(given), torch.device("cpu")).module
        assert (module.share_embeddings_and_output_weights, module.position_embedding_type) == (
            tied, position
        )  # fmt: skip
        assert (module.max_sequence_length, module.vocab_size) == (24, 320)
    for dtype in ("bfloat16", "float16"):
        told = Trainee(config(dtype=dtype), torch.device("cpu")).optimizer.config
        given = told.params_dtype, told.bf16, told.fp16
        assert given == (getattr(torch, dtype), dtype == "bfloat16", dtype == "float16")
    return found


def test_the_optimizer_gets_each_field_of_the_configuration():
    (found,) = run_ranks(schedules, 1)
    lr, least, warmup, end = (LOOP[key] for key in ("lr", "min_lr", "warmup_steps", "decay_steps"))
    for name, last in (("cosine", least), ("constant", lr)):
        for step, (rate, decay) in enumerate(found[name], 1):
            done = min(1.0, max(0, step - warmup) / (end - warmup))
            after = last + (lr - last) * (1 + math.cos(math.pi * done)) / 2
            assert rate == pytest.approx(lr * step / warmup if step <= warmup else after)
            assert decay == LOOP["weight_decay"]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({}, {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4,
              "ffn_hidden_size": 48, "normalization": "RMSNorm", "gated_linear_unit": False,
              "activation_func": torch.nn.functional.gelu, "add_bias_linear": False,
              "hidden_dropout": 0.0, "attention_dropout": 0.0}),
        ({"normalization": "LayerNorm", "swiglu": True, "bias": True},
         {"normalization": "LayerNorm", "gated_linear_unit": True, "add_bias_linear": True,
          "activation_func": torch.nn.functional.silu}),
    ],
)  # fmt: skip
def test_the_model_gets_each_field_of_the_configuration(model, expected):
    found = transformer_config(config(model))
    assert {name: getattr(found, name) for name in expected} == expected


def test_half_precision_and_tensor_parallelism_are_those_of_the_configuration():
    for tp, asked in ((1, True), (2, True), (2, False)):
        parallel = {"parallel": {"tp": tp, "sequence_parallel": asked}}
        found = transformer_config(
            TrainConfig.model_validate(
                {"model": MODEL, "train": LOOP | {"dtype": "bfloat16"}} | parallel
            )
        )
        assert found.tensor_model_parallel_size == tp
        assert found.sequence_parallel is (asked and tp > 1)
        assert (found.params_dtype, found.bf16, found.fp16) == (torch.bfloat16, True, False)


@pytest.mark.parametrize("updated", [True, False], ids=["updated", "skipped"])
def test_a_step_is_confirmed_and_moves_the_schedule_only_with_an_update(monkeypatch, updated):
    """float16 skips the update of a step whose gradients overflowed."""
    calls = []

    def note(name, result=None):
        return lambda *_, **__: calls.append(name) or result

    monkeypatch.setattr(loop, "confirm_step", note("confirm"))
    alone = SimpleNamespace(size=lambda: 1)
    monkeypatch.setattr(
        loop, "parallel_state", SimpleNamespace(get_data_parallel_group=lambda: alone)
    )
    monkeypatch.setattr(
        loop, "get_forward_backward_func", lambda: note("backward", [{"loss": torch.ones(())}])
    )
    monkeypatch.setattr(loop.dist, "all_reduce", note("sum"))
    trainee = SimpleNamespace(
        microbatches=2, learning_rate=lambda: 0.5,
        model=SimpleNamespace(zero_grad_buffer=note("zero")),
        optimizer=SimpleNamespace(zero_grad=note("zero"), step=note("update", (updated, 1, 0))),
        scheduler=SimpleNamespace(step=note("schedule")),
    )  # fmt: skip
    row = loop.one_step(config(), trainee, iter(()))
    steps = ["zero", "zero", "backward", "confirm", "update", *["schedule"] * updated, "sum"]
    assert calls == steps
    assert (row["lr"], row["loss"]) == (0.5, 1.0)


@on_cpu_ranks(2)
def test_all_ranks_stop_where_one_has_the_signal(rank):
    stop = loop.StopRequest()
    assert not stop.agreed(torch.device("cpu"))
    if rank == 1:
        signal.raise_signal(signal.SIGTERM)
    assert stop.agreed(torch.device("cpu"))

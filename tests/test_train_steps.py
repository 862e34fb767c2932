"""What a run's configuration asks for reaches the optimizer, and what a step and a stop do."""

from __future__ import annotations

import math
import signal
from types import SimpleNamespace
from unittest import mock

import pytest

pytest.importorskip("megatron.core", reason="needs the extra `train`")

import torch
from megatron.core import parallel_state
from ranks import on_cpu_ranks

from flux_megatron.integration.cpu_device import pretend_cuda
from flux_megatron.lab.train import loop
from flux_megatron.lab.train.config import TrainConfig
from flux_megatron.lab.train.model import Trainee, transformer_config

MODEL = {"num_layers": 2, "hidden": 32, "heads": 4, "ffn": 48, "seq_length": 24}
LOOP = {
    "steps": 9, "micro_batch": 1, "global_batch": 2, "lr": 0.02, "min_lr": 0.004,
    "warmup_steps": 2, "decay_steps": 6, "weight_decay": 0.3, "clip": 0.7,
}  # fmt: skip


def config(model: dict = MODEL, parallel: dict | None = None, **train: object) -> TrainConfig:
    sections = {"model": MODEL | model, "parallel": parallel or {"tp": 1}, "train": LOOP | train}
    return TrainConfig.model_validate(sections)


@on_cpu_ranks(1)
def test_the_optimizer_gets_each_field_of_the_configuration(rank):
    """And so do the learning rate and the weight decay of each step."""
    pretend_cuda()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
    lr, least, warmup, end = (LOOP[key] for key in ("lr", "min_lr", "warmup_steps", "decay_steps"))
    for train, last in (({}, least), ({"decay_steps": None}, lr)):  # a cosine, and constant
        trainee = Trainee(config(**train), torch.device("cpu"))
        told, plan = trainee.optimizer.config, trainee.scheduler
        assert (told.lr, told.min_lr, told.weight_decay, told.clip_grad, told.params_dtype) == (
            lr, least, LOOP["weight_decay"], LOOP["clip"], torch.float32
        )  # fmt: skip
        assert (plan.max_lr, plan.min_lr) == (lr, least)
        for step in range(1, LOOP["steps"] + 1):
            plan.step(1)
            done = min(1.0, max(0, step - warmup) / (end - warmup))
            after = last + (lr - last) * (1 + math.cos(math.pi * done)) / 2
            rate = lr * step / warmup if step <= warmup else after
            assert trainee.learning_rate() == pytest.approx(rate)
            decays = {g["weight_decay"] for g in trainee.optimizer.param_groups if g["wd_mult"]}
            assert decays == {LOOP["weight_decay"]}
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
        parallel = {"tp": tp, "sequence_parallel": asked}
        found = transformer_config(config(parallel=parallel, dtype="bfloat16"))
        assert found.tensor_model_parallel_size == tp
        assert found.sequence_parallel is (asked and tp > 1)
        assert (found.params_dtype, found.bf16, found.fp16) == (torch.bfloat16, True, False)


@pytest.mark.parametrize("updated", [True, False], ids=["updated", "skipped"])
def test_a_step_is_confirmed_and_moves_the_schedule_only_with_an_update(monkeypatch, updated):
    """float16 skips the update of a step whose gradients overflowed."""
    made = mock.Mock()
    made.backward.return_value = [{"loss": torch.ones(())}]
    made.trainee.optimizer.step.return_value = (updated, 1, 0)
    made.trainee.learning_rate = lambda: 0.5
    monkeypatch.setattr(loop, "confirm_step", made.confirm)
    monkeypatch.setattr(loop, "get_forward_backward_func", lambda: made.backward)
    alone = SimpleNamespace(get_data_parallel_group=lambda: SimpleNamespace(size=lambda: 1))
    monkeypatch.setattr(loop, "parallel_state", alone)
    monkeypatch.setattr(loop.dist, "all_reduce", made.sum)
    row = loop.one_step(config(), made.trainee, iter(()))
    assert [name.removeprefix("trainee.") for name, _, _ in made.mock_calls] == [
        "model.zero_grad_buffer", "optimizer.zero_grad", "backward", "confirm", "optimizer.step",
        *["scheduler.step"] * updated, "sum",
    ]  # fmt: skip
    assert (row["lr"], row["loss"]) == (0.5, 1.0)


@on_cpu_ranks(2)
def test_all_ranks_stop_where_one_has_the_signal(rank):
    stop = loop.StopRequest()
    assert not stop.agreed(torch.device("cpu"))
    if rank == 1:
        signal.raise_signal(signal.SIGTERM)
    assert stop.agreed(torch.device("cpu"))

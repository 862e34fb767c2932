"""From text files to samples; what a run's configuration asks of the optimizer; what a step and a
stop do; when a checkpoint becomes the newest one, and on which ranks a run goes on from it.
"""

import math
import multiprocessing
import signal
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from ranks import on_cpu_ranks, run_ranks
from train_words import load

from flux_megatron.lab.cpu import pretend_cuda
from flux_megatron.lab.train import checkpoint, data, loop, run_folder, text
from flux_megatron.lab.train.config import TrainConfig
from flux_megatron.lab.train.model import Trainee, transformer_config

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "text"
    (root / "sub").mkdir(parents=True)
    (root / "b.txt").write_text("second, with \u00fc and \u4e2d\n")
    (root / "sub" / "a.txt").write_text("third\n" * 40)
    (root / "a.txt").write_text("first\n")
    (root / "image.txt").write_bytes(b"\x89PNG\0\0")
    (root / ".hidden.txt").write_text("no\n")
    return root


def test_tokenizer_round_trip():
    tokenizer, given = text.ByteTokenizer(), "def f():\n\treturn '\u00fc\u4e2d\U0001f600'\0"
    tokens = tokenizer.tokenize(given)
    assert tokenizer.detokenize([*tokens, tokenizer.eod]) == given
    assert max(tokens) < tokenizer.eod < tokenizer.vocab_size
    assert tokenizer.pad < 0, "padding must not hide a token of the data"


def test_files_in_name_order_without_binary_and_hidden_ones(folder):
    """By default those of the standard library."""
    files = text.files(load(data__path=str(folder)))
    assert [f.relative_to(folder).as_posix() for f in files] == ["a.txt", "b.txt", "sub/a.txt"]
    files = text.files(load(data__path=None))
    assert any(file.match("asyncio/events.py") for file in files)
    assert not [f for f in files if "site-packages" in f.parts or f.suffix != ".py"]


@on_cpu_ranks(1)
def test_indexed_files_hold_the_text_of_the_first_start(rank, folder, tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    config, kept = load(data__path=str(folder)), tmp_path / "data"
    parallel_state.initialize_model_parallel()
    first = data.gpt_dataset(config, kept)
    indexed, tokenizer = IndexedDataset(str(kept / "text")), text.ByteTokenizer()
    assert [int(document[-1]) for document in indexed] == [tokenizer.eod] * 3
    texts = [tokenizer.detokenize(document.tolist()) for document in indexed]
    assert texts == ["first\n", "second, with \u00fc and \u4e2d\n", "third\n" * 40]
    (folder / "a.txt").write_text("changed\n")
    for torn in (kept / "indices").glob("*.npy"):
        torn.write_bytes(b"torn")
    again = data.gpt_dataset(config, kept)
    assert len(again) == len(first) > 3
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one["tokens"], other["tokens"])


def test_ranks_share_every_sample_and_resume_where_they_stopped(monkeypatch):
    config = load(train__micro_batch=2, train__global_batch=4)
    samples = [{"tokens": torch.tensor([index])} for index in range(10)]
    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda: 2)

    def take(rank, consumed, count):
        monkeypatch.setattr(parallel_state, "get_data_parallel_rank", lambda: rank)
        batches = data.microbatches(samples, config, consumed, CPU)
        return [next(batches)["tokens"].flatten().tolist() for _ in range(count)]

    assert take(0, 0, 3) == [[0, 1], [4, 5], [8, 9]]
    assert take(1, 0, 3) == [[2, 3], [6, 7], [0, 1]]  # the epoch begins again
    assert take(1, 4, 2) == take(1, 0, 3)[1:]


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
        trainee = Trainee(config(**train), CPU)
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
        module = Trainee(config(given), CPU).module
        assert (module.share_embeddings_and_output_weights, module.position_embedding_type) == (
            tied, position
        )  # fmt: skip
        assert (module.max_sequence_length, module.vocab_size) == (24, 320)
    for dtype in ("bfloat16", "float16"):
        told = Trainee(config(dtype=dtype), CPU).optimizer.config
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
    for tp, asked in ((1, True), (2, True), (2, False)):
        parallel = {"tp": tp, "sequence_parallel": asked}
        found = transformer_config(config(model, parallel, dtype="bfloat16"))
        assert {name: getattr(found, name) for name in expected} == expected
        assert (found.tensor_model_parallel_size, found.sequence_parallel) == (tp, asked and tp > 1)
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
    assert not stop.agreed(CPU)
    if rank == 1:
        signal.raise_signal(signal.SIGTERM)
    assert stop.agreed(CPU)


TEXTS = [(torch.arange(33) * (index + 3)) % 250 for index in range(8)]
SAMPLES = [
    {"tokens": tokens[:-1], "labels": tokens[1:], "position_ids": torch.arange(32),
     "loss_mask": torch.ones(32)}
    for tokens in TEXTS
]  # fmt: skip


def started(settings: dict) -> tuple[TrainConfig, Trainee]:
    multiprocessing.current_process()._config["daemon"] = False  # Megatron's writers are children
    pretend_cuda()
    config = load(parallel__tp=dist.get_world_size(), **settings)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    model_parallel_cuda_manual_seed(config.train.seed)
    torch.manual_seed(config.train.seed)
    return config, Trainee(config, CPU)


def trained(rank: int, out: Path, settings: dict, steps: int, resume: bool) -> list[float]:
    """The losses of `steps` steps; a checkpoint of the second one is written, or read before."""
    config, trainee = started(settings)
    done = checkpoint.load(run_folder.latest(out), trainee) if resume else 0
    batches = data.microbatches(SAMPLES, config, done * 2, CPU)
    losses = []
    for step in range(done + 1, done + steps + 1):
        losses.append(loop.one_step(config, trainee, batches)["loss"])
        if step == 2:
            checkpoint.save(out, trainee, 2)
    return losses


SWIGLU = {"model__swiglu": True, "model__bias": True, "model__tied_embeddings": False}


@pytest.mark.parametrize(("settings", "sizes"), [({}, (1, 4)), (SWIGLU, (1,))], ids=["", "swiglu"])
def test_a_checkpoint_of_two_ranks_resumes_on_others(tmp_path, settings, sizes):
    straight, _ = run_ranks(trained, 2, tmp_path, settings | {"layers": "stock"}, 4, False)
    assert len({*straight}) == 4
    for ranks in sizes:
        for losses in run_ranks(trained, ranks, tmp_path, settings, 2, True):
            assert losses == pytest.approx(straight[2:], abs=1e-5, rel=0)


@on_cpu_ranks(1)
def test_latest_never_names_what_is_not_whole(rank, tmp_path):
    """Of a kill in the middle nothing is seen, and the same step can be written again."""
    config, trainee = started({"layers": "stock"})
    loop.one_step(config, trainee, data.microbatches(SAMPLES, config, 0, CPU))
    checkpoint.save(tmp_path, trainee, 1)
    serialization = checkpoint.dist_checkpointing.serialization
    killed = mock.patch.object(serialization, "save_config", side_effect=OSError("killed"))
    with killed, pytest.raises(OSError, match="killed"):
        checkpoint.save(tmp_path, trainee, 2)
    assert (tmp_path / "checkpoints" / "step_2" / "common.pt").exists()
    assert checkpoint.load(run_folder.latest(tmp_path), trainee) == 1
    checkpoint.save(tmp_path, trainee, 2)
    assert run_folder.latest(tmp_path).name == "step_2"
    assert checkpoint.load(run_folder.latest(tmp_path), trainee) == 2

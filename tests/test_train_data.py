"""From text files to samples: the tokenizer, the indexed files, and who gets which sample."""

from __future__ import annotations

import pytest

pytest.importorskip("megatron.core", reason="needs the extra `train`")

import torch
from megatron.core import parallel_state
from ranks import on_cpu_ranks
from train_words import load

from flux_megatron.lab.train import data, text
from flux_megatron.lab.train.text import ByteTokenizer


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
    tokenizer, given = ByteTokenizer(), "def f():\n\treturn '\u00fc\u4e2d\U0001f600'\0"
    tokens = tokenizer.tokenize(given)
    assert tokenizer.detokenize([*tokens, tokenizer.eod]) == given
    assert max(tokens) < tokenizer.eod < tokenizer.vocab_size
    assert tokenizer.pad < 0, "padding must not hide a token of the data"


def test_files_in_name_order_without_binary_and_hidden_ones(folder):
    files = text.files(load(data__path=str(folder)))
    assert [f.relative_to(folder).as_posix() for f in files] == ["a.txt", "b.txt", "sub/a.txt"]


def test_default_data_is_the_standard_library():
    files = text.files(load(data__path=None))
    assert any(file.match("asyncio/events.py") for file in files)
    assert not [f for f in files if "site-packages" in f.parts or f.suffix != ".py"]


@on_cpu_ranks(1)
def test_indexed_files_hold_the_text_of_the_first_start(rank, folder, tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    config, kept = load(data__path=str(folder)), tmp_path / "data"
    parallel_state.initialize_model_parallel()
    first = data.gpt_dataset(config, kept)
    indexed, tokenizer = IndexedDataset(str(kept / "text")), ByteTokenizer()
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


class Numbered:
    """Sample i is {"tokens": [i]}."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return {"tokens": torch.tensor([index])}


def test_ranks_share_every_sample_and_resume_where_they_stopped(monkeypatch):
    config = load(train__micro_batch=2, train__global_batch=4)
    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda: 2)

    def take(rank, consumed, count):
        monkeypatch.setattr(parallel_state, "get_data_parallel_rank", lambda: rank)
        batches = data.microbatches(Numbered(), config, consumed, torch.device("cpu"))
        return [next(batches)["tokens"].flatten().tolist() for _ in range(count)]

    assert take(0, 0, 3) == [[0, 1], [4, 5], [8, 9]]
    assert take(1, 0, 3) == [[2, 3], [6, 7], [0, 1]]  # the epoch begins again
    assert take(1, 4, 2) == take(1, 0, 3)[1:]

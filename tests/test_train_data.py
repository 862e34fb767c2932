"""From text files to samples.

The tokenizer, the indexed files, their cache, and who gets which sample.
"""

from __future__ import annotations

import io
import os

import pytest

pytest.importorskip("megatron.core", reason="needs the extra `train`")

import torch
from rich.console import Console

from flux_megatron.lab.train import data
from flux_megatron.lab.train.config import ConfigError, DataConfig
from flux_megatron.lab.train.tokenizer import ByteTokenizer

QUIET = Console(file=io.StringIO())


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
    tokenizer, text = ByteTokenizer(), "def f():\n\treturn '\u00fc\u4e2d\U0001f600'\0"
    tokens = tokenizer.tokenize(text)
    assert tokenizer.detokenize(tokens) == text
    assert tokenizer.detokenize([*tokens, tokenizer.eod]) == text
    assert max(tokens) < tokenizer.eod < tokenizer.vocab_size
    assert tokenizer.pad not in tokenizer.vocab, "padding must not hide a token of the data"


def test_files_in_name_order_without_binary_and_hidden_ones(folder):
    root, files = data.text_files(DataConfig(path=folder))
    assert [f.relative_to(root).as_posix() for f in files] == ["a.txt", "b.txt", "sub/a.txt"]
    _, some = data.text_files(DataConfig(path=folder, pattern="b*"))
    assert [f.name for f in some] == ["b.txt"]


def test_default_data_is_the_standard_library():
    root, files = data.text_files(DataConfig())
    assert root / "asyncio" / "events.py" in files
    assert not [f for f in files if "site-packages" in f.parts or f.suffix != ".py"]


def test_indexed_files_hold_the_text_and_are_built_once(folder, tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    prefix = data.indexed_dataset(DataConfig(path=folder), tmp_path / "cache", QUIET)
    indexed, tokenizer = IndexedDataset(str(prefix)), ByteTokenizer()
    assert [int(document[-1]) for document in indexed] == [tokenizer.eod] * 3
    texts = [tokenizer.detokenize(document.tolist()) for document in indexed]
    assert texts == ["first\n", "second, with \u00fc and \u4e2d\n", "third\n" * 40]

    built = prefix.with_suffix(".bin").stat().st_mtime_ns
    assert data.indexed_dataset(DataConfig(path=folder), tmp_path / "cache", QUIET) == prefix
    assert prefix.with_suffix(".bin").stat().st_mtime_ns == built
    again = data.indexed_dataset(DataConfig(path=folder), tmp_path / "cache2", QUIET)
    for suffix in (".bin", ".idx"):
        assert again.with_suffix(suffix).read_bytes() == prefix.with_suffix(suffix).read_bytes()


def test_a_changed_file_is_another_data_set(folder, tmp_path):
    first = data.indexed_dataset(DataConfig(path=folder), tmp_path / "cache", QUIET)
    os.utime(folder / "a.txt", ns=(1, 1))
    second = data.indexed_dataset(DataConfig(path=folder), tmp_path / "cache", QUIET)
    assert first != second
    assert not list((tmp_path / "cache").glob("*.partial*"))


@pytest.mark.parametrize(("suffix", "size"), [(".bin", 10), (".idx", 20), (".bin", 0)])
def test_torn_texts_are_named_and_built_anew(folder, tmp_path, suffix, size):
    console = Console(file=io.StringIO())
    wanted = DataConfig(path=folder)
    prefix = data.indexed_dataset(wanted, tmp_path / "cache", console)
    torn = prefix.with_suffix(suffix)
    whole = torn.read_bytes()
    os.truncate(torn, size)
    assert data.indexed_dataset(wanted, tmp_path / "cache", console) == prefix
    assert torn.read_bytes() == whole
    assert f"{torn} has {size} bytes, {len(whole)} expected" in console.file.getvalue()
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [prefix.parent.name]


def test_a_cache_that_cannot_be_written_is_named(folder):
    with pytest.raises(ConfigError, match=r"data\.cache: .* cannot be written \(Not a directory\)"):
        data.indexed_dataset(DataConfig(path=folder), folder / "a.txt", QUIET)


class _Numbered:
    """Sample i is {"tokens": [i]}."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return {"tokens": torch.tensor([index])}


class _Config:
    class train:
        micro_batch = 2


def test_ranks_share_every_sample_and_resume_where_they_stopped():
    def take(rank, consumed, count):
        batches = data.microbatches(_Numbered(), _Config, rank, 2, consumed, torch.device("cpu"))
        return [next(batches)["tokens"].flatten().tolist() for _ in range(count)]

    assert take(0, 0, 3) == [[0, 1], [4, 5], [8, 9]]
    assert take(1, 0, 3) == [[2, 3], [6, 7], [0, 1]]  # the epoch begins again
    assert take(1, 4, 2) == take(1, 0, 3)[1:]

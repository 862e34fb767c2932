"""The text that a run reads, as bytes: token i is byte i, token 256 ends a document. No torch."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import ClassVar

from flux_megatron.errors import BadInput
from flux_megatron.lab.train.config import TrainConfig
from flux_megatron.launch.workload import BYTE_VOCAB

SNIFF_BYTES = 8192  # a NUL byte this early means that a file is no text
SKIPPED = {"site-packages", "dist-packages", "__pycache__"}  # of the standard library's folder


class ByteTokenizer:
    """What Megatron's datasets ask of a tokenizer."""

    vocab_size, eod = BYTE_VOCAB, BYTE_VOCAB - 1
    pad = -1  # no token of ours: nothing in the data may be taken for padding
    # the dataset builder writes these into the key of its index
    unique_identifiers: ClassVar = {"cls": "ByteTokenizer", "vocab_size": BYTE_VOCAB}

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode())

    def detokenize(self, ids: list[int]) -> str:
        """The text of `ids`; end-of-document tokens vanish, cut characters become U+FFFD."""
        return bytes(i for i in ids if i < self.eod).decode(errors="replace")


def files(config: TrainConfig) -> list[Path]:
    """The text files of a run, in an order that depends on their names only.

    `BadInput` where they cannot be read, or are shorter than one sample.
    """
    root = config.data.path or Path(sysconfig.get_path("stdlib"))
    if not root.is_dir():
        raise BadInput(f"data.path: {root} given, a folder of text files expected")

    def is_text(path: Path) -> bool:
        parts = path.relative_to(root).parts
        if not path.is_file() or any(part.startswith(".") for part in parts):
            return False
        with path.open("rb") as stream:
            return b"\0" not in stream.read(SNIFF_BYTES)

    paths = root.rglob("*" if config.data.path else "*.py")
    skipped = set() if config.data.path else SKIPPED
    try:
        found = [path for path in paths if skipped.isdisjoint(path.parts) and is_text(path)]
        tokens = sum(path.stat().st_size + 1 for path in found)
    except OSError as error:
        raise BadInput(f"data.path: {error.filename} cannot be read ({error.strerror})") from None
    if tokens <= config.model.seq_length:
        raise BadInput(
            f"data.path: {tokens} tokens of text in {root}, more than "
            f"model.seq_length={config.model.seq_length} expected"
        )
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())

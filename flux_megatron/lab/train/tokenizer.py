"""The byte tokenizer: token i is byte i, token 256 ends a document. Every text fits."""

from __future__ import annotations

from collections import OrderedDict

from megatron.core.tokenizers import MegatronTokenizerBase

from flux_megatron.lab.train.config import BYTE_VOCAB


class ByteTokenizer(MegatronTokenizerBase):
    """What Megatron's datasets ask of a tokenizer, over UTF-8 bytes."""

    def __init__(self) -> None:
        super().__init__("bytes", {"library": "flux_megatron", "class_name": type(self).__name__})
        # the dataset builder writes these into the key of its index cache
        self.unique_identifiers = OrderedDict(cls=type(self).__name__, vocab_size=BYTE_VOCAB)

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode())

    def detokenize(self, ids: list[int]) -> str:
        """The text of `ids`; end-of-document tokens vanish, cut characters become U+FFFD."""
        return bytes(i for i in ids if i < self.eod).decode(errors="replace")

    @property
    def vocab(self) -> dict[int, int]:
        return {i: i for i in range(BYTE_VOCAB)}

    @property
    def inv_vocab(self) -> dict[int, int]:
        return self.vocab

    @property
    def vocab_size(self) -> int:
        return BYTE_VOCAB

    @property
    def eod(self) -> int:
        return BYTE_VOCAB - 1

    @property
    def pad(self) -> int:
        return -1  # no token of ours: nothing in the data may be taken for padding

    def apply_chat_template(self) -> None:
        raise NotImplementedError("byte tokens have no chat template")

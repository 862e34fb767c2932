"""Text as it is decoded: the first prompt's live, the others' when those before are done."""

from __future__ import annotations

import codecs
from typing import IO


class TextStream:
    """Writes each prompt and what follows it. Bytes that are no text yet wait for the next ones."""

    def __init__(self, prompts: tuple[str, ...], out: IO[str]) -> None:
        self._out, self._prompts, self._live = out, prompts, 0
        decoder = codecs.getincrementaldecoder("utf-8")
        self._decoders = [decoder(errors="replace") for _ in prompts]
        self._waiting = [*prompts]
        self._ended = [False for _ in prompts]
        self._title()

    def add(self, row: int, token: int) -> None:
        """The next byte of a prompt's text."""
        self._waiting[row] += self._decoders[row].decode(bytes([token]))
        self._write()

    def end(self, row: int) -> None:
        """Nothing follows."""
        self._waiting[row] += self._decoders[row].decode(b"", final=True) + "\n"
        self._ended[row] = True
        self._write()

    def _write(self) -> None:
        while self._live < len(self._prompts):
            text, self._waiting[self._live] = self._waiting[self._live], ""
            self._out.write("".join(map(_shown, text)))
            self._out.flush()
            if not self._ended[self._live]:
                return
            self._live += 1
            self._title()

    def _title(self) -> None:
        if len(self._prompts) > 1 and self._live < len(self._prompts):
            self._out.write(f"== prompt {self._live + 1}\n")


def _shown(character: str) -> str:
    """Of a model's text nothing may reach the terminal as a command."""
    return character if character.isprintable() or character in "\n\t" else "\ufffd"

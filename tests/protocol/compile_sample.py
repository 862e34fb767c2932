"""Compiles and assembles one kernel of each kind for each architecture, in a process of its own.

    python compile_sample.py FILE    writes JSON: name -> {"ptx": ..., "shared_bytes": ...}

The files beside this one compile every configuration, which takes minutes: this is what another
version of Triton is tried with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import compile_hopper
from compile_kernels import ARCHITECTURES, shipped
from compile_source import ptx_of, write

from flux_megatron.kernels.triton_launch import Code


def one_of_each(found: Iterable[tuple[str, Code]], kind: int) -> Iterator[tuple[str, Code]]:
    """Of those whose word of this number is the same the first."""
    first: dict[str, tuple[str, Code]] = {}
    for name, code in found:
        first.setdefault(name.split()[kind], (name, code))
    yield from first.values()


def main() -> None:
    found = {
        name: (code, architecture)
        for architecture in ARCHITECTURES
        for name, code in one_of_each(shipped(architecture, ("bfloat16",)), 1)
    }
    for name, code in one_of_each(compile_hopper.shipped().items(), 0):
        found[f"hopper {name}"] = code, 90
    write(found, ptx_of)


if __name__ == "__main__":
    main()

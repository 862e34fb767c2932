"""Compiles and assembles one kernel of each kind for each architecture, in a process of its own.

    python compile_sample.py FILE    writes JSON: name -> {"ptx": ..., "shared_bytes": ...}

The files beside this one compile every configuration, which takes minutes: this is what another
version of Triton is tried with. Where its Gluon is none for Hopper, only portable kernels are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from unittest import mock

import torch
from compile_kernels import ARCHITECTURES, shipped
from forked_work import write_results

from flux_megatron.kernels import launch
from flux_megatron.kernels.hopper import gemm as hopper_gemm


def portable() -> Iterator[tuple[str, Callable[[], dict]]]:
    for architecture in ARCHITECTURES:
        kinds = set()
        for name, make in shipped(architecture, ("bfloat16",)):
            kind = name.split()[1]
            if kind not in kinds:
                kinds.add(kind)
                yield name, make


def hopper() -> Iterator[tuple[str, Callable[[], dict]]]:
    import compile_hopper

    kinds = set()
    hopper_gpu = {"get_device_capability": lambda: (9, 0)}
    with (
        mock.patch.multiple(torch.cuda, **hopper_gpu),
        mock.patch.object(launch, "sms", return_value=compile_hopper.SMS),
    ):
        for name, configuration in compile_hopper.shipped().items():
            kind = name.split()[0]
            if kind not in kinds:
                kinds.add(kind)
                yield f"hopper {name}", partial(compile_hopper.compiled, configuration)


def main(path: str) -> None:
    work = dict(portable())
    if hopper_gemm.gluon_unavailable() is None:
        work |= hopper()
    write_results(work, path)


if __name__ == "__main__":
    main(sys.argv[1])

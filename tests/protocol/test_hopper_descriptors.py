"""What the host prepares for Hopper kernels: descriptors, and kernels before a race."""

from __future__ import annotations

import pytest
import torch
from virtual_machine import PackageCopy

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from flux_megatron.kernels.descriptors import described, described_w


def test_one_is_made_for_each_address_shape_dtype_and_block():
    x = torch.zeros(128, 64, dtype=torch.bfloat16)
    first = described(x, 64, 64)
    assert first.base.data_ptr() == x.data_ptr()
    assert (first.shape, first.strides, first.block_shape) == ([128, 64], [64, 1], [64, 64])
    assert described(x, 64, 64) is first
    others = [
        described(x, 128, 64), described(x[64:], 64, 64), described(x.view(64, 128), 64, 64),
        described(x.view(torch.float16), 64, 64),
    ]  # fmt: skip
    assert all(other is not first for other in others)


@pytest.mark.parametrize(("layout", "block"), [("nt", [128, 32]), ("nn", [32, 128])])
def test_blocks_of_w_lie_as_w_does(layout, block):
    w = torch.zeros(256, 256, dtype=torch.bfloat16)
    assert described_w(w, layout, block_k=32, columns=128).block_shape == block


def test_a_launch_without_triton_finds_descriptors_first():
    """`launch_expanded` pairs a kernel's first arguments with what Triton knows of descriptors."""
    package = PackageCopy()
    for name, kernel in package.hopper_kernels.kernels.items():
        names = getattr(getattr(package, name), kernel).arg_names
        described = [one.endswith("_desc") for one in names]
        assert described == sorted(described, reverse=True), name

"""Aggregates: what Gluon's kernels take as one argument."""

from __future__ import annotations

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from triton.experimental.gluon import language as gl

from flux_megatron.kernels.gluon_versions import Number, Pointer, aggregate


def a_range():
    @aggregate
    class Range:
        first: Number
        last: Number
        STEP: gl.constexpr

    return Range


def test_an_aggregate_takes_its_fields_in_their_order():
    made = a_range()(1, gl.constexpr(2), 3)
    assert [field.value for field in (made.first, made.last, made.STEP)] == [1, 2, 3]


@pytest.mark.parametrize("values", [(1, 2), (1, 2, 3, 4)])
def test_it_takes_as_many_values_as_it_has_fields(values):
    with pytest.raises(ValueError, match=r"argument 2 is (short|long)er"):
        a_range()(*values)


def test_each_is_of_its_type():
    @aggregate
    class Place:
        memory: Pointer

    with pytest.raises(TypeError, match="for attribute 'memory'"):
        Place(3)

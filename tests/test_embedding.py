"""Embedding + All-to-All: exact against the reference and torch's own gradients; wrong input."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from closeness import assert_exact, small_integers
from ranks import DEVICE, here, on_device_ranks

import flux_megatron
from flux_megatron import errors
from flux_megatron.embedding import fused_bags, sequential_bags, sparse_gradient
from flux_megatron.embedding.bags import Bags
from flux_megatron.lab import reference
from flux_megatron.nn import ShardedEmbeddingBag
from flux_megatron.symm.workspaces import workspace

operate = flux_megatron.embedding_all_to_all


@dataclass(frozen=True)
class Case:
    tables: tuple[int, ...]
    rows: int = 11
    D: int = 8
    samples: int = 5  # of each rank
    longest: int = 4
    mode: str = "sum"
    dtype: torch.dtype = torch.float32
    hot: bool = False  # nearly all entries name one row
    empty: bool = False  # no entries at all

    def operands(self, seed: int) -> list[tuple[torch.Tensor, ...]]:
        """weight, indices, offsets and dy of every rank: integers; lengths are powers of two or
        zero, so that means are exact too.
        """
        made = torch.Generator().manual_seed(seed)
        batch = self.samples * len(self.tables)

        def on_rank(local: int) -> tuple[torch.Tensor, ...]:
            weight = small_integers((local, self.rows, self.D), self.dtype, made, 2)
            powers = torch.tensor([0, *(2**n for n in range(self.longest.bit_length()))])
            lengths = powers[torch.randint(len(powers), (local * batch,), generator=made)]
            lengths *= not self.empty
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
            indices = torch.randint(self.rows, (int(offsets[-1]),), generator=made)
            if self.hot:
                indices[torch.rand(indices.shape, generator=made) < 0.9] = self.rows - 1
            dy = small_integers((self.samples, sum(self.tables), self.D), self.dtype, made, 1)
            return weight, indices, offsets, dy * 4

        return [on_rank(local) for local in self.tables]

    def expected(self, operands, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The result, and the gradient that torch's autograd gives in fp64."""
        weight, indices, offsets, dy = (list(part) for part in zip(*operands, strict=True))
        y = reference.embedding_all_to_all(weight, indices, offsets, self.mode)[rank]
        wide = weight[rank].double().requires_grad_()
        batch = self.samples * len(self.tables)
        counts = offsets[rank][::batch].diff()
        flat = indices[rank] + (torch.arange(len(wide)) * self.rows).repeat_interleave(counts)
        pooled = F.embedding_bag(
            flat, wide.flatten(0, 1), offsets[rank], mode=self.mode, include_last_offset=True
        ).view(len(wide), batch, self.D)
        mine = torch.cat(dy).split(self.tables, 1)[rank]
        pooled.transpose(0, 1).backward(mine.double())
        return y, wide.grad.to(self.dtype)


def of_world() -> list[Case]:
    return [case for case in CASES.values() if len(case.tables) == dist.get_world_size()]


CASES = {
    "odd sizes": Case((3, 3), D=12, samples=7),
    "its sizes in bf16": Case((3, 3), D=12, samples=7, dtype=torch.bfloat16),
    "uneven tables": Case((1, 4), samples=3),
    "gradients of several pages": Case((3, 2), D=64, samples=40),
    "one hot row": Case((2, 2), samples=6, longest=8, hot=True),
    "hot row in bf16": Case((2, 1), samples=6, longest=8, hot=True, dtype=torch.bfloat16),
    "only empty bags": Case((1, 2), empty=True),
    "means": Case((2, 2), mode="mean", longest=8),
    "means in bf16": Case((1, 2), mode="mean", dtype=torch.bfloat16, D=3),
    "one row": Case((1, 1), rows=1, D=1, samples=1),
    "four ranks": Case((2, 1, 3, 1), samples=5, D=6),
    "one rank": Case((3,), samples=5, D=6),
    "one rank, empty bags": Case((2,), empty=True),
    "one rank, means in bf16": Case((2,), mode="mean", dtype=torch.bfloat16, D=3),
    "three ranks": Case((1, 3, 2), samples=3, D=6),
    "three ranks, empty bags": Case((1, 1, 2), empty=True),
    "three ranks, hot means": Case((2, 1, 1), mode="mean", samples=2, longest=8, hot=True),
    "eight ranks": Case((1, 2, 1, 1, 3, 1, 1, 1), samples=2, D=6, rows=5),
    "eight ranks, empty bags": Case((2, *[1] * 7), samples=1, rows=2, D=2, empty=True),
}


def call(
    case: Case, rank: int, seed: int, strategy: str, **options
) -> tuple[torch.Tensor, torch.Tensor]:
    weight, *rest, dy = (one.to(DEVICE) for one in case.operands(seed)[rank])
    weight.requires_grad_()
    given = {"tables": case.tables, "mode": case.mode, "strategy": strategy}
    y = operate(weight, *rest, dist.group.WORLD, **given, **options)
    y.backward(dy)
    return y.detach(), weight.grad


def exact_calls(rank: int, cases: list[Case], strategy: str) -> None:
    got = [(case, seed, *call(case, rank, seed, strategy)) for seed in range(3) for case in cases]
    for case, seed, y, dw in got:  # all of them now: later calls leave results alone
        expected_y, expected_dw = case.expected(case.operands(seed), rank)
        assert_exact(y, expected_y, f"{case} seed {seed}")
        assert_exact(dw, expected_dw, f"{case} gradient, seed {seed}")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("strategy", ["fused", "sequential"])
@on_device_ranks("world_size")
def test_exact(rank, strategy):
    exact_calls(rank, of_world(), strategy)
    report = flux_megatron.report()
    assert report.calls == {("embedding_a2a", strategy): 3 * 2 * len(of_world())}
    assert report.fallbacks == {}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("strategy", ["fused", "sequential"])
@on_device_ranks("world_size")
def test_sparse_gradients_are_exact(rank, strategy):
    cases = of_world()
    for case in cases:
        y, dw = call(case, rank, 0, strategy, sparse=True)
        given = case.operands(0)
        weight, indices, *_ = given[rank]
        expected_y, expected_dw = case.expected(given, rank)
        assert_exact(y, expected_y, f"{case}")
        assert (dw.layout, dw._nnz()) == (torch.sparse_coo, len(indices))
        wide = torch.sparse_coo_tensor(dw._indices(), dw._values().float(), dw.shape)
        assert_exact(wide.to_dense().to(weight.dtype), expected_dw, f"{case} gradient")
        leaf = weight.clone().to(DEVICE).requires_grad_()
        leaf.grad = dw
        torch.optim.SGD([leaf], 1.0).step()
        if case.dtype == torch.float32:
            assert_exact(leaf.detach(), weight - expected_dw, "a step")
    counted = {("embedding_a2a", "sequential"): len(cases)}
    counted |= {("embedding_a2a", strategy): (1 + (strategy == "sequential")) * len(cases)}
    assert flux_megatron.report().calls == counted


@on_device_ranks(2)
def test_exact_in_pieces(rank):
    """Slices of two samples and chunks of four entries, which nobody asks for by the operator."""
    case = Case((2, 3), samples=7, longest=16, hot=True, rows=5)
    space = workspace(dist.group.WORLD, here())
    for seed in range(3):
        weight, indices, offsets, dy = (one.to(DEVICE) for one in case.operands(seed)[rank])
        bags = Bags.of(weight, offsets, case.tables, rank, "sum")
        y = fused_bags.forward(weight, indices, offsets, bags, space, 2)
        dw = fused_bags.backward(dy, indices, offsets, bags, space, 2, 4)
        expected_y, expected_dw = case.expected(case.operands(seed), rank)
        assert_exact(y, expected_y, "y")
        assert_exact(dw, expected_dw, "dw")


@pytest.mark.parametrize("table_rows", [2**31 - 1, 2**31, 2**32 + 2**31])
def test_rows_beyond_32_bits_have_keys_of_64(table_rows, monkeypatch):
    """Where nobody has the memory: the rows' starts are not made."""
    monkeypatch.setattr(torch, "searchsorted", lambda keys, rows: keys)
    monkeypatch.setattr(torch, "arange", _short_arange)
    bags = Bags((1,), 0, table_rows, 4, 3, "sum", torch.float32)
    indices = torch.tensor([table_rows - 1, 5, table_rows])
    keys, entries, *_ = fused_bags.sorted_entries(indices, torch.tensor([0, 1, 2, 3]), bags)
    assert keys.tolist() == [5, table_rows - 1, table_rows]
    assert entries.tolist() == [1, 0, 2]
    assert keys.dtype == (torch.int32 if table_rows < 2**31 else torch.int64)


def _short_arange(end: int, *given, arange=torch.arange, **options) -> torch.Tensor:
    return arange(min(end, 8), *given, **options)


@on_device_ranks(2)
def test_sums_are_rounded_once(rank):
    """In bf16: 256 + 1 + 1 + 1 is 260 and 256 + 1 + 1 is 258, but 256 where each is rounded."""
    weight = torch.tensor([256.0, 1, 1, 1], dtype=torch.bfloat16, device=DEVICE)
    weight = weight[None, :, None].expand(1, 4, 8).contiguous()
    indices = torch.arange(4, device=DEVICE).repeat(8)
    offsets = torch.arange(0, 33, 4, device=DEVICE)
    dy = torch.tensor([[256.0, 1, 0, 0], [1, 0, 0, 0]][rank], dtype=weight.dtype, device=DEVICE)
    dy = dy[:, None, None].expand(4, 2, 8).contiguous()
    bags, space = Bags.of(weight, offsets, (1, 1), rank, "sum"), workspace(dist.group.WORLD, here())
    y = fused_bags.forward(weight, indices, offsets, bags, space)
    assert_exact(y.float(), torch.full((4, 2, 8), 260.0), "y")
    for chunk in (4, 64):  # sums of chunks, and of single entries
        dw = fused_bags.backward(dy, indices, offsets, bags, space, chunk=chunk)
        assert_exact(dw.float(), torch.full((1, 4, 8), 258.0), f"dw in chunks of {chunk}")


@on_device_ranks(2)
def test_the_same_bits_every_time(rank):
    torch.manual_seed(rank)
    weight = torch.randn(2, 5, 8, device=DEVICE, requires_grad=True)
    offsets = torch.arange(0, 2 * 6 * 40 + 1, 40, device=DEVICE)
    indices = torch.randint(5, (480,), device=DEVICE)
    dy = torch.randn(3, 4, 8, device=DEVICE)

    def gradient(strategy: str) -> tuple[torch.Tensor, torch.Tensor]:
        y = operate(weight, indices, offsets, dist.group.WORLD, strategy=strategy)
        return y.detach(), torch.autograd.grad(y, weight, dy)[0]

    first, second, torch_s = map(gradient, ("fused", "fused", "sequential"))
    for one, other, right in zip(first, second, torch_s, strict=True):
        assert_exact(one, other, "the second time")
        torch.testing.assert_close(one, right)


WRONG = [
    ({"indices": [0, 2, 3, 1]}, "index 3 given at 2, 0 to 2 expected"),
    ({"indices": [0, -1, 1, 1]}, "index -1 given at 1, 0 to 2 expected"),
    ({"offsets": [0, 3, 1, 3, 4]}, "offsets 3, 1 given at 1, rising ones expected"),
    ({"offsets": [0, 1, 1, 3, 3]}, "offsets from 0 to 3 given, 0 to 4 expected"),
    ({"offsets": [1, 1, 1, 3, 4]}, "offsets from 1 to 4 given, 0 to 4 expected"),
    ({"offsets": [0, 1, 4]}, "1 + a multiple of 2 tables x 2 ranks expected"),
    ({"tables": [2, 3]}, "[2, 3] tables a rank expected"),
    ({"tables": [2]}, "tables [2] given, one number for each of 2 ranks expected"),
    ({"mode": "max"}, "mode 'max' given"),
    ({"indices": torch.tensor([0, 2, 1, 1]).int()}, "indices [4] int32"),
    ({"weight": torch.ones(2, 3, 5)}, "the ranks of the group do not agree on the call: rank 0"),
]


@on_device_ranks(2)
def test_bad_input_is_refused_on_every_rank_and_the_next_call_works(rank):
    def attempt(**changes) -> None:
        """Rank 1's call is wrong."""
        given = {"weight": torch.ones(2, 3, 4), "indices": [0, 2, 1, 1], "tables": [2, 2]}
        given |= {"offsets": [0, 1, 1, 3, 4]} | (changes if rank == 1 else {})
        tensors = [torch.as_tensor(given.pop(n)) for n in ("weight", "indices", "offsets")]
        operate(*[one.to(DEVICE) for one in tensors], dist.group.WORLD, **given)

    for changes, words in WRONG:
        mismatch = errors.ProblemMismatch if "weight" in changes else ValueError
        with pytest.raises(mismatch, match=re.escape(words)) as caught:
            attempt(**changes)
        assert "rank 1" in str(caught.value), words
    attempt()


@on_device_ranks(2)
def test_without_validation_nothing_outside_a_table_is_read(rank):
    """An index outside its table adds nothing, and shapes are refused on their rank alone."""
    weight = torch.ones(1, 3, 4, device=DEVICE)
    indices, offsets = torch.tensor([0, 9, -1, 1]).to(DEVICE), torch.tensor([0, 2, 4]).to(DEVICE)
    y = operate(weight, indices, offsets, dist.group.WORLD, strategy="fused", validate=False)
    assert_exact(y, torch.ones(1, 2, 4))
    with pytest.raises(ValueError, match="mode 'max' given"):
        operate(weight, indices, offsets, dist.group.WORLD, mode="max", validate=False)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("kind", ["fused", "sequential", "sparse"])
@on_device_ranks(2)
def test_what_is_outside_a_table_has_no_gradient(rank, kind, mode):
    """Nor does it give one to the tables before and behind, or to a chunk of several entries."""
    rows, entries = 3, 12
    numbers = torch.arange(4 * entries).view(2, 2, entries) % (rows + 2) - 1  # -1 to 3 of 0 to 2
    numbers[1, 1, 3], numbers[0, 0, 7] = 2**31, -(2**32) + 1  # in 32 bits another one
    indices = numbers.flatten().to(DEVICE)
    offsets = torch.arange(0, 4 * entries + 1, entries, device=DEVICE)
    space, part = workspace(dist.group.WORLD, here()), 1 / entries if mode == "mean" else 1
    bags = Bags((2, 2), rank, rows, 4, 2, mode, torch.float32)
    dy = torch.full((1, 4, 4), float(entries * 2**rank), device=DEVICE)
    if kind == "fused":
        dw = fused_bags.backward(dy, indices, offsets, bags, space, chunk=4)
    elif kind == "sequential":
        dw = sequential_bags.backward(dy, indices, offsets, bags, space)
    else:
        values = sparse_gradient.values(dy, indices, offsets, bags, space)
        dw = sparse_gradient.as_tensor(values, indices, offsets, 2, rows).to_dense()
    named = torch.stack([(numbers == row).sum(-1) for row in range(rows)], -1)  # table, bag, row
    expected = (named * torch.tensor([1, 2])[:, None]).sum(1) * entries * part
    torch.testing.assert_close(dw.cpu(), expected[..., None].float().expand(2, rows, 4))


@on_device_ranks(2, environment={"FLUX_MEGATRON_STRATEGY": "pipelined"})
def test_a_fallback_is_counted_with_its_reason(rank):
    case = CASES["odd sizes"]
    with pytest.warns(UserWarning, match="embedding_a2a runs without overlap: pipelined"):
        call(case, rank, 0, "auto")
    wide = torch.ones(1, 2, 2, dtype=torch.float64, device=DEVICE)
    indices, offsets = torch.zeros(2, dtype=torch.int64), torch.arange(3)
    with pytest.raises(ValueError, match="dtype float64 is none of"):
        operate(wide, indices.to(DEVICE), offsets.to(DEVICE), dist.group.WORLD, strategy="fused")
    reasons = [f"{pattern}: {why}" for pattern, why in flux_megatron.report().fallbacks]
    assert reasons == ["embedding_a2a: pipelined is not built for embedding_a2a"]


@on_device_ranks(2)
def test_module_has_the_tables_of_one_process(rank):
    torch.manual_seed(0)
    layer = ShardedEmbeddingBag(3, 5, 4, device=DEVICE)
    torch.manual_seed(0)
    whole = torch.stack([torch.empty(5, 4, device=DEVICE).normal_() for _ in range(3)])
    assert layer.tables == (2, 1)
    assert layer.own_tables == (slice(0, 2), slice(2, 3))[rank]
    assert_exact(layer.weight, whole[layer.own_tables])
    offsets = torch.arange(2 * layer.weight.shape[0] + 1, device=DEVICE)
    indices = torch.arange(len(offsets) - 1, device=DEVICE)
    assert_exact(layer(indices, offsets)[:, 0], whole[0][[rank]])
    with pytest.raises(ValueError, match="1 tables given, at least one for each of 2 ranks"):
        ShardedEmbeddingBag(1, 5, 4)

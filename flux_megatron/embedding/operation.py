"""`embedding_all_to_all`: pooled embedding bags of sharded tables, each rank's samples of all
tables; forward and backward, as torch custom operators.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from flux_megatron import errors, settings
from flux_megatron.dispatch import refuse, refuse_wrappers
from flux_megatron.embedding import fused_bags, sequential_bags, sparse_gradient
from flux_megatron.embedding.bags import Bags, data_error, shape_error
from flux_megatron.kernels import launch
from flux_megatron.overlap import collectives
from flux_megatron.overlap.operands import memory
from flux_megatron.overlap.report import note_call, note_fallback
from flux_megatron.symm import objects
from flux_megatron.symm.device import capturing
from flux_megatron.symm.groups import group_named, name_of
from flux_megatron.symm.workspace import Workspace
from flux_megatron.symm.workspaces import workspace

NAME = "embedding_a2a"
STRATEGIES: dict[str, ModuleType] = {"fused": fused_bags, "sequential": sequential_bags}


def embedding_all_to_all(
    weight: Tensor, indices: Tensor, offsets: Tensor, group: ProcessGroup, *,
    tables: Sequence[int] | None = None, mode: str = "sum", strategy: str = "auto",
    validate: bool = True, sparse: bool = False,
) -> Tensor:  # fmt: skip
    """Embedding + All-to-All (SC'24, arXiv 2305.06942): bags are pooled where their tables are, and
    sent to the ranks of their samples as soon as a slice of them is pooled.

        y = torch.stack([F.embedding_bag(indices[t], w[t], offsets[t], mode=mode)
                         for t in all_tables], 1).chunk(R)[rank]

    | tensor | shape on each rank (R = world size, B = samples of all ranks) |
    | --- | --- |
    | weight | [T_local, rows, D], the rank's own tables; D and dtype are the same on all ranks |
    | indices | int64 [nnz], rows of a table, bag after bag |
    | offsets | int64 [T_local * B + 1]: bag t * B + b, of table t and sample b, is indices from \
offsets[t * B + b] to that of the next; empty bags are zero |
    | result | [B / R, T, D]: the rank's samples of all tables, those of rank 0 first |

    `tables` has each rank's T_local; None: the same on all. Differentiable in weight: its gradient
    is dense and, like the result, the same bits every time. With `sparse` it is a sparse COO tensor
    with a value for each entry, not coalesced, as of `torch.nn.EmbeddingBag(sparse=True)`; it
    travels by one all-to-all, whatever the strategy. `strategy` is "fused", "sequential" or
    "auto": fused where it can run and there are other ranks.

    With `validate` the ranks compare what they were given before any of them starts: each raises
    `ValueError` if an index, the offsets or a shape is wrong on one of them, `ProblemMismatch` if
    their calls differ. That is a small all-reduce for which the host waits, left out of captures.
    Without it shapes alone are checked, and an index outside its table adds nothing under "fused",
    and no gradient under any strategy.
    """
    name = name_of(group)
    refuse_wrappers(NAME, group, weight=weight, indices=indices, offsets=offsets)
    if tables is None:
        tables = [weight.shape[0]] * group.size()
    return _embedding_all_to_all(
        weight, indices, offsets, list(tables), name, mode, strategy, validate, sparse
    )


@torch.library.custom_op("flux_megatron::embedding_all_to_all", mutates_args=())
def _embedding_all_to_all(
    weight: Tensor, indices: Tensor, offsets: Tensor, tables: Sequence[int], group: str, mode: str,
    strategy: str, validate: bool, sparse: bool = False,
) -> Tensor:  # fmt: skip
    space = workspace(group_named(group), weight.device)
    space.check()  # before a question that a rank which has failed would not answer
    rank, world_size = space.group.rank(), space.world_size
    weight, indices, offsets = (
        memory(what, given)
        for what, given in (("weight", weight), ("indices", indices), ("offsets", offsets))
    )
    compares = validate and not capturing(space.device)
    if offsets.shape == (1,) and not indices.numel():  # no samples, on any rank
        words = f"no samples of {sum(tables)} tables"
        if compares:
            _compare("", words, space)
        space.note_agreed(words)
        return weight.new_empty(0, sum(tables), weight.shape[-1])
    error = shape_error(weight, indices, offsets, tables, rank, world_size, mode)
    if not error and strategy not in ("auto", *STRATEGIES):
        error = f"strategy {strategy!r} given, one of {['auto', *STRATEGIES]} expected"
    if compares:
        error = error or data_error(indices, offsets, weight.shape[1])
        words = "" if error else str(Bags.of(weight, offsets, tables, rank, mode))
        _compare(error, words, space)
    elif error:
        refuse(f"{NAME}: {error}", space.group, weight.device)
    bags = Bags.of(weight, offsets, tables, rank, mode)
    with _call(bags, strategy, space, "forward") as module:
        return module.forward(weight, indices, offsets, bags, space)


@_embedding_all_to_all.register_fake
def _(weight, indices, offsets, tables, group, mode, strategy, validate, sparse=False):
    batch = (offsets.shape[0] - 1) // weight.shape[0]
    return weight.new_empty(batch // len(tables), sum(tables), weight.shape[2])


@torch.library.custom_op("flux_megatron::embedding_all_to_all_backward", mutates_args=())
def _backward(
    dy: Tensor, indices: Tensor, offsets: Tensor, rows: int, tables: Sequence[int], group: str,
    mode: str, strategy: str, sparse: bool = False,
) -> Tensor:  # fmt: skip
    """dw, or with `sparse` what each entry adds to it (`sparse_gradient`)."""
    space = workspace(group_named(group), dy.device)
    space.check()
    rank, D = space.group.rank(), dy.shape[2]
    if not dy.shape[0]:
        return dy.new_zeros(0, D) if sparse else dy.new_zeros(tables[rank], rows, D)
    bags = Bags(tuple(tables), rank, rows, D, dy.shape[0] * len(tables), mode, dy.dtype)
    if sparse:
        with _call(bags, "sequential", space, "sparse backward"):
            return sparse_gradient.values(dy, indices, offsets, bags, space)
    with _call(bags, strategy, space, "backward") as module:
        return module.backward(dy, indices, offsets, bags, space)


@_backward.register_fake
def _(dy, indices, offsets, rows, tables, group, mode, strategy, sparse=False):
    if sparse:
        return dy.new_empty(indices.shape[0], dy.shape[2])
    local = (offsets.shape[0] - 1) // max(1, dy.shape[0] * len(tables))
    return dy.new_empty(local, rows, dy.shape[2])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weight, indices, offsets, *ctx.options, _, ctx.sparse = inputs
    ctx.local, ctx.rows, _ = weight.shape
    ctx.save_for_backward(indices, offsets)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    dw = None
    if ctx.needs_input_grad[0]:
        indices, offsets = ctx.saved_tensors
        dw = _backward(dy, indices, offsets, ctx.rows, *ctx.options, ctx.sparse)
        if ctx.sparse:
            dw = sparse_gradient.as_tensor(dw, indices, offsets, ctx.local, ctx.rows)
    return dw, *(None,) * 8


_embedding_all_to_all.register_autograd(_gradients, setup_context=_keep)


def _compare(error: str, words: str, space: Workspace) -> None:
    """Return if no rank has an error and all mean the same call. Collective."""
    digest = zlib.crc32(words.encode())
    verdict = torch.tensor([bool(error), digest, -digest], device=space.device)
    space.note(f"{NAME}: the ranks compare what they were given")
    collectives.run(space, dist.all_reduce, verdict, op=dist.ReduceOp.MAX)
    wrong, most, least = verdict.tolist()
    if not wrong and most == -least:
        return
    with space.guard():
        said = objects.all_gather((error, words), space.group)
    if wrong:
        wrongs = [f"rank {r}: {one}" for r, (one, _) in enumerate(said) if one]
        raise ValueError(f"{NAME}: {'; '.join(wrongs)}")
    quotes = "; ".join(f"rank {r}: {text}" for r, (_, text) in enumerate(said))
    raise errors.ProblemMismatch(f"the ranks of the group do not agree on the call: {quotes}")


@contextmanager
def _call(bags: Bags, strategy: str, space: Workspace, direction: str) -> Iterator[ModuleType]:
    """Choose who computes it, the same on all ranks. The call is counted when it is enqueued; one
    that falls back, before it.
    """
    wanted = settings.get().strategy if strategy == "auto" else strategy
    alone, reason = space.world_size == 1 and strategy != "fused", None
    if wanted in ("auto", "fused"):
        reason = space.unavailable or launch.supports_tensors(bags.dtype, space.device.type)
    elif wanted != "sequential":
        reason = f"{wanted} is not built for {NAME}"
    plain = reason is not None or wanted == "sequential" or alone
    name = "sequential" if plain else "fused"
    if strategy == "fused" and reason is not None:
        refuse(f"{NAME}: strategy 'fused' cannot run: {reason}", space.group, space.device)
    space.note_agreed(f"{bags} {direction} by {name}")
    fallback = None if alone else reason
    if fallback is not None:
        note_fallback(NAME, fallback)
    with space.guard(whole=True):
        yield STRATEGIES[name]
    if fallback is None:
        note_call(NAME, name)

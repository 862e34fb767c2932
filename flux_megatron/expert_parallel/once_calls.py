"""The calls of `once`, in a workspace and without autograd."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from flux_megatron.kernels.experts import token_call
from flux_megatron.kernels.experts.token_call import Routes
from flux_megatron.overlap import transfer
from flux_megatron.overlap.phase import phase
from flux_megatron.symm.channel import Call
from flux_megatron.symm.workspace import Workspace

# the channels of a workspace
ROUTES, SEND, GIVE_BACK = "token routes", "tokens sent", "tokens given back"


def routed(
    weights: Tensor, chosen: Tensor, space: Workspace, topk: int, capacity: int, reverse: bool
) -> tuple[Routes, Tensor]:
    """As `once.route`."""
    with _of_choices(space, chosen, topk) as call:
        return token_call.exchange(call, chosen, weights, topk, capacity, reverse)


def returned(gradients: Tensor, routes: Routes, like: Tensor, space: Workspace) -> Tensor:
    """Gradients of the weights of rows, fp32 [capacity], as those of all weights of this rank's
    tokens, `like` [T, R E].
    """
    with _of_choices(space, routes.chosen, routes.slots) as call:
        return token_call.return_gradients(call, gradients, routes, like)


def sent(x: Tensor, routes: Routes, space: Workspace) -> Tensor:
    """As `once.send`."""
    with _of_rows(space, SEND, x, routes) as call:
        return token_call.send(call, x, routes)


def given_back(rows: Tensor, routes: Routes, space: Workspace) -> Tensor:
    """As `once.give_back`."""
    with _of_rows(space, GIVE_BACK, rows, routes) as call:
        return token_call.give_back(call, rows, routes)


@contextmanager
def _call(space: Workspace, channel: str, what: str, size_bytes: int) -> Iterator[Call]:
    """An open call. `what` is the same on all ranks, which are asked once for each new kind."""
    space.check()
    with space.guard(whole=True), phase(channel):
        space.note_agreed(f"{channel} {what}")
        call = transfer.begin(space, channel, size_bytes)
        yield call
        space.end(call)


def _of_choices(space: Workspace, chosen: Tensor, topk: int):
    tokens, experts = len(chosen), chosen.shape[1] // space.world_size
    what = f"T={tokens} E={experts} top {topk} over {space.world_size} ranks"
    size = token_call.header_bytes(space.world_size, experts, tokens)
    return _call(space, ROUTES, what, size)


def _of_rows(space: Workspace, channel: str, rows: Tensor, routes: Routes):
    sizes = space.world_size, routes.tokens, rows.shape[1]
    what = f"T={sizes[1]} columns={sizes[2]} slots={routes.slots} {rows.dtype}"
    return _call(space, channel, what, token_call.region_bytes(*sizes, rows.element_size()))

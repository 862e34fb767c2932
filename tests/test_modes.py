"""Calls under modes of torch: what a call makes for later ones keeps no mode of its caller, so the
first call may come in a mode and training outside, or the other way round.
"""

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from unittest import mock

import pytest
import test_embedding
import test_expert_parallel
import torch
import torch.distributed as dist
from cases import Case, call, operands
from closeness import assert_exact
from layer_cases import check, layer
from ranks import DEVICE, here, on_device_ranks
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import flux_megatron
from flux_megatron.device import Channel
from flux_megatron.expert_parallel import ops as expert_ops
from flux_megatron.nn import ColumnParallelLinear
from flux_megatron.nn.functions import local_linear
from flux_megatron.patterns import Pattern
from flux_megatron.symm import workspace as workspace_module
from flux_megatron.symm.lasting import lasting
from flux_megatron.symm.workspaces import workspaces
from flux_megatron.tuning import timing

STRATEGIES = ("sequential", "pipelined", "fused", "low_latency", "signalled")


@contextmanager
def switched(switch: Callable, on: object, off: object):
    switch(on)
    try:
        yield
    finally:
        switch(off)


bf16_by_default = partial(switched, torch.set_default_dtype, torch.bfloat16, torch.float32)


@contextmanager
def side_stream():
    with torch.cuda.stream(torch.cuda.Stream()):
        yield
        torch.cuda.synchronize()


class Counting(torch.utils._python_dispatch.TorchDispatchMode):
    """As profilers and FLOP counters are: with it a call is one operator."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


MODES: dict[str, Callable[[], AbstractContextManager]] = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast(DEVICE, torch.bfloat16),
    "default dtype": bf16_by_default,
    "default device": lambda: torch.device("meta"),
    "deterministic": partial(switched, torch.use_deterministic_algorithms, True, False),
    "stream": side_stream if DEVICE == "cuda" else nullcontext,
    "dispatch mode": Counting,
    "functorch": nullcontext,
}
EVERY = MODES | {"fake": FakeTensorMode}  # under which operands of operators are fake too


def within(mode: str, work: Callable[[], list[Tensor]]) -> list[Tensor]:
    if mode != "functorch":
        with EVERY[mode]():
            return work()
    found = []

    def differentiated(z: Tensor) -> Tensor:
        found.extend(work())
        return z.sum()

    torch.func.grad(differentiated)(torch.ones(1, device=DEVICE))
    return found


def compare(mode: str, work: Callable[[], list[Tensor]], *right: Tensor) -> None:
    for result, expected in zip(within(mode, work), right, strict=True):
        assert_exact(result.clone(), expected, mode)


def forward(rank: int, mode: str, rows: int) -> None:
    cases = [Case(pattern, rows, 16, 24, kept=0.5) for pattern in Pattern]
    given = [operands(case, 2) for case in cases]

    def work() -> list[Tensor]:
        return [call(case, one, dist.group.WORLD) for case, one in zip(cases, given, strict=True)]

    compare(mode, work, *(one.expected[rank] for one in given))


def experts(rank: int, mode: str, rows: int) -> None:
    tests, group = test_expert_parallel, dist.group.WORLD
    made = tests.operands(tests.even, 2, 3, rows, 16, torch.float32, "nt", 0)
    x, w, v, counts = (one[rank].to(DEVICE) for one in (made.x, made.w, made.v, made.counts))

    def work() -> list[Tensor]:
        hidden, _ = expert_ops.a2a_gemm(x, w, counts, group, capacity=made.capacity)
        return [hidden, expert_ops.gemm_a2a(hidden, v, counts, group, tokens=len(x))]

    hidden, y, *_ = tests.expected(made, "nt")
    compare(mode, work, hidden[rank], y[rank])


def bags(rank: int, mode: str, rows: int) -> None:
    case = test_embedding.Case((1, 2), samples=rows)
    made = case.operands(0)
    given = [one.to(DEVICE) for one in made[rank][:3]]
    operate = partial(flux_megatron.embedding_all_to_all, *given, dist.group.WORLD)
    compare(mode, lambda: [operate(tables=case.tables)], case.expected(made, rank)[0])


def assert_lasting() -> None:
    """No tensor that a workspace holds belongs to a mode."""
    seen: dict[int, object] = {}
    held: list[object] = list(workspaces())
    while held:
        one = held.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, Tensor):
            assert type(one) is Tensor
            assert not one.is_inference()
            assert not torch._C._functorch.is_functorch_wrapped_tensor(one)
            assert one.device.type in ("cpu", DEVICE), one.device
        elif isinstance(one, (tuple, list)):
            held += one
        elif isinstance(one, dict):
            held += one.values()
        elif type(one).__module__.startswith("flux_megatron"):
            held += getattr(one, "__dict__", {}).values()  # lists of driver calls have none
    assert any(isinstance(one, Tensor) for one in seen.values())


def train(rank: int, rows: int) -> None:
    for kind in ("column", "row"):
        check(layer(kind, 2, torch.float32, (rows, 2), 16, 24, False, 0.5), rank, "xw")
    flux_megatron.confirm_step()


def each_of(strategies: tuple[str, ...], count: int) -> list[tuple[str, str]]:
    """`count` of the strategies with each mode, others with the next."""
    turns = itertools.cycle(strategies)
    return [(next(turns), mode) for mode in MODES for _ in range(count)]


@pytest.mark.parametrize(("strategy", "mode"), each_of(STRATEGIES, 2))
@on_device_ranks(2, environment={"FLUX_MEGATRON_STRATEGY": "{strategy}"})
def test_no_mode_outlives_its_call(rank, mode):
    """First in the mode, then training; then larger calls in the mode, and training like them."""
    for rows in (4, 24):
        forward(rank, mode, rows)
        assert_lasting()
        train(rank, rows)
    train(rank, 40)
    forward(rank, mode, 40)


@pytest.mark.parametrize(
    ("strategy", "mode"), [*each_of(("fused", "signalled"), 1), ("sequential", "inference")]
)
@on_device_ranks(2, environment={"FLUX_MEGATRON_STRATEGY": "{strategy}"})
def test_experts_and_bags(rank, mode):
    for rows in (4, 24):
        for work in (experts, bags):
            work(rank, mode, rows)
            assert_lasting()
            work(rank, "no_grad", rows)


def _opened(name: str, size_bytes: int) -> list[Tensor]:
    with Channel(name, dist.group.WORLD, here()).begin(size_bytes):
        (space,) = workspaces()
        for region in space.channels[f"kernel {name}"]._regions:
            region.prepared(lambda region: torch.zeros(1, device=DEVICE))
    return []


@on_device_ranks(2)
def test_channels_of_own_kernels(rank):
    """Channels of own kernels are opened in a mode itself, not within an operator."""
    for number, mode in enumerate(EVERY):
        for size_bytes in (64, 8192):
            opened = partial(_opened, f"of {number}", size_bytes)
            with mock.patch.object(workspace_module, "REFRESH_EVERY", 1):
                within(mode, opened)
            assert_lasting()
            opened()


def test_lasting_leaves_gradients_off():
    with torch.inference_mode(), lasting():
        assert not torch.is_grad_enabled()


@on_device_ranks(1)
def test_times_have_a_dtype_of_their_own(rank):
    """Microseconds in bf16 would be off by 0.4 %, as much as plans differ."""
    with bf16_by_default():
        found = timing._slowest({"nothing": lambda: None}, dist.group.WORLD, here(), 1, None, 0.0)
    assert found.dtype == torch.float64


@on_device_ranks(2)
def test_forward_mode_is_refused_by_name_and_vmap_works(rank):
    group = dist.group.WORLD
    layer = ColumnParallelLinear(4, 4, device=DEVICE)
    x, w = torch.ones(2, 4, device=DEVICE), layer.weight.detach()
    names: dict[str, Callable[[Tensor], Tensor]] = {
        "column layer": layer,
        "local_linear": lambda x: local_linear(x, w, None, allreduce_group=group),
        "gemm_ar": lambda x: flux_megatron.gemm_all_reduce(x, w, group),
        "embedding_a2a": lambda x: flux_megatron.embedding_all_to_all(x[None], bags, bags, group),
        "a2a_gemm": lambda x: flux_megatron.a2a_gemm(x, w[None], counts, group, capacity=4)[0],
    }
    bags, counts = (
        torch.arange(3, device=DEVICE),
        torch.ones(2, 1, dtype=torch.int32, device=DEVICE),
    )
    for name, traced in names.items():
        for one, given in ((traced, x), (torch.func.vmap(traced), x[None])):
            refused = partial(pytest.raises, NotImplementedError, match=f"^{name}: forward-mode")
            with refused():
                torch.func.jacfwd(one)(given)
            with refused(), forward_ad.dual_level():
                one(forward_ad.make_dual(given, given))
    batch = torch.stack([x, 2 * x])
    assert_exact(torch.func.vmap(layer)(batch), torch.stack([layer(one) for one in batch]))

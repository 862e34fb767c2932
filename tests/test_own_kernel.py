"""The tutorial's kernels, scripts/own_kernel.py and its Gluon twin, on real ranks: exact, call
after call; what goes wrong is reported; and docs/extend.md shows the script's own lines.
"""

import ast
import importlib
import inspect
import re
import sys
import textwrap
import time
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from cases import ON_HOPPER
from closeness import assert_exact
from own_kernel_cases import EPS, SCRIPTS, exact_shard, exact_weight, expected
from ranks import DEVICE, be_late, here, on_cpu_ranks, on_device, on_device_ranks

import flux_megatron
from flux_megatron import errors
from flux_megatron.device import SLOTS, Channel
from flux_megatron.symm import places

PAGE = Path(__file__).parents[1] / "docs" / "extend.md"
BF16 = torch.bfloat16
# M_shard, N, elements of a tile, dtype: one tile; a ragged last one; several tiles for a signal
SHAPES = ((8, 16, 4096, BF16), (5, 12, 32, torch.float32), (66, 20, 32, BF16))


def script(name: str) -> ModuleType:
    if str(SCRIPTS) not in sys.path:
        sys.path.insert(0, str(SCRIPTS))
    return importlib.import_module(name)


def check(rank: int, name: str, calls: int) -> None:
    """Calls of every shape, back to back, each with a late rank; every other one on a GPU is a
    replay.
    """
    world_size, kernel = dist.get_world_size(), script(name).all_gather_rms_norm
    channel = Channel("all_gather_rms_norm", dist.group.WORLD, here())
    for M_shard, N, block_elements, dtype in SHAPES:
        numbers = range(calls if M_shard < SLOTS else 2)  # a tile takes milliseconds on CPU
        shards = [
            [exact_shard(call, r, M_shard, N, dtype) for r in range(world_size)] for call in numbers
        ]
        mine = [of_call[rank].to(here()) for of_call in shards]
        x, weight = torch.empty_like(mine[0]), exact_weight(N, dtype).to(here())
        graph, replayed, results = None, None, []
        for call in numbers:
            x.copy_(mine[call])
            if call % world_size == rank:
                be_late(0.01)
            if DEVICE == "cuda" and call % 2:
                if graph is None:
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        replayed = kernel(x, weight, channel, EPS, block_elements)
                graph.replay()
                results.append(replayed.clone())
            else:
                results.append(kernel(x, weight, channel, EPS, block_elements))
        flux_megatron.synchronize()
        for call, y in zip(numbers, results, strict=True):
            assert_exact(y, expected(shards[call], weight.cpu(), EPS), f"call {call}")


@pytest.mark.parametrize("world_size", [1, 2, 4])
@on_device_ranks("world_size")
def test_exact(rank, world_size):
    check(rank, "own_kernel", 20 if world_size == 2 else 4)


@pytest.mark.skipif(not ON_HOPPER, reason="Gluon needs GPUs of compute capability 9")
@on_device_ranks(2)
def test_gluon_exact(rank):
    check(rank, "own_kernel_gluon", 20)


def silent(rank: int) -> str:
    """Rank 1 begins a call and sends nothing in it."""
    channel = Channel("silent", dist.group.WORLD, here())
    x = torch.ones(8, 16, device=here())
    try:
        if rank == 1:
            with channel.begin(2 * x.nbytes):
                time.sleep(3)
        else:
            script("own_kernel").all_gather_rms_norm(x, x[0], channel)
        flux_megatron.synchronize()
    except (errors.SignalTimeout, errors.GroupBroken) as error:
        return str(error)
    return ""


def test_a_late_wait_is_reported():
    said, _ = on_device(silent, 2, environment={"FLUX_MEGATRON_TIMEOUT_S": "1"}, fresh=True)
    late = "rank 0 .* waited 1 s for communication tile 0 of rank 1: epoch 1 expected, 0 seen"
    assert re.search(late, said)


@on_cpu_ranks(2, environment={"FLUX_MEGATRON_TIMEOUT_S": "5"})
def test_refused_calls_are_named_on_every_rank(rank):
    channel = Channel("refused", dist.group.WORLD, here())
    kind = errors.ProblemMismatch if rank else ValueError
    said = "size_bytes 0 given, 1 or more expected"
    with pytest.raises(kind, match=said) as refused, channel.begin((0, 64)[rank]):
        pass
    assert rank or str(refused.value) == f"kernel refused: {said}"
    with pytest.raises(errors.ProblemMismatch) as refused, channel.begin((64, 128)[rank]):
        pass
    for r, size_bytes in enumerate((64, 128)):
        assert f"rank {r}: kernel refused with {size_bytes} bytes" in str(refused.value)
    fails = pytest.raises(RuntimeError, match="not ready") if rank == 0 else nullcontext()
    with fails, channel.begin(64):
        if rank == 0:
            raise RuntimeError("my kernel is not ready")
    dist.barrier()
    with pytest.raises(errors.GroupBroken, match="my kernel is not ready"), channel.begin(64):
        pass


@on_cpu_ranks(2)
def test_ranks_of_several_nodes_are_refused(rank):
    places.machine = lambda: f"node{rank}"
    refused = pytest.raises(errors.WorkspaceError, match=r"^kernel apart: .* spans 2 nodes")
    with refused, Channel("apart", dist.group.WORLD, here()).begin(64):
        pass


def without_docstring(module: ModuleType, name: str, prefix: str) -> list[str]:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(getattr(module, name).fn))).body
    body = node.body[1:] if ast.get_docstring(node) else node.body
    lines = "\n".join([ast.unparse(node.args), *map(ast.unparse, body)])
    return re.sub(rf"\b{prefix}\.", "tl.", lines).splitlines()


def test_gluon_has_the_same_names_and_does_the_same():
    ours = importlib.import_module("flux_megatron.device.triton")
    gluon = importlib.import_module("flux_megatron.device.gluon")
    assert {*ours.__all__} - {*gluon.__all__} == {"acquire_for_tma_loads"}  # in `wait_tile`
    for name in ("deadline_after", "peer_pointer", "put_tile", "count_tile", "signal_tile",
                 "draw_tile"):  # fmt: skip
        assert getattr(gluon, name) is getattr(ours, name), name
    for name in ("wait_tile", "rank_barrier"):
        assert without_docstring(gluon, name, "gl") == without_docstring(ours, name, "tl"), name


def test_the_page_shows_the_scripts_own_lines():
    source = (SCRIPTS / "own_kernel.py").read_text().splitlines()
    shown: set[int] = set()
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        count = len(block.splitlines())
        places = [
            range(first, first + count) for first in range(len(source))
            if textwrap.dedent("\n".join(source[first : first + count])) == block.rstrip("\n")
        ]  # fmt: skip
        assert len(places) == 1, f"{len(places)} times in the script:\n{block}"
        shown |= {*places[0]}
    lines, number = inspect.getsourcelines(script("own_kernel").all_gather_rms_norm_kernel.fn)
    assert [
        text for at, text in enumerate(lines, number - 1) if text.strip() and at not in shown
    ] == []

"""Whole calls of the kernels for GPUs where there is none: Triton compiles and launches, the driver
is `fake_driver`, and a second rank is pretended.

    python offline_calls.py FILE    writes JSON: what calls enqueue, by a strategy and by a list

For a process of its own, without the interpreter. It starts itself anew where the driver is found
before another one would be.
"""

# ruff: noqa: E402
from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))
import fake_driver

if "FAKE_DRIVER" not in os.environ:
    folder = tempfile.mkdtemp()
    library = str(fake_driver.build(Path(folder)))
    found = {"FAKE_DRIVER": library, "LD_LIBRARY_PATH": folder, "TRITON_LIBCUDA_PATH": folder}
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **found})

import rank_pool
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver as active

CALLERS, COPY, SMS = 5, 7, 132
M_SHARD, N, K = 1024, 1024, 512
FEW_ROWS = 16  # a shard, of `low_latency`
FIRST_EPOCHS = {
    "gather": 70000,
    "scatter": 90000,
    "words": 110000,
    "rows beside": 130000,
}  # no size is such a number


class Offline:
    """Triton's driver, on the pretended one."""

    launcher_cls = nvidia.CudaLauncher

    def __init__(self) -> None:
        self.utils = nvidia.CudaUtils()

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return CALLERS


active.set_active(Offline())
CUDABackend.make_cubin = lambda self, *given: b""  # the driver asks for no machine code
DRIVER = fake_driver.Driver(Path(os.environ["FAKE_DRIVER"]))
with contextlib.suppress(ImportError):  # what engines have elsewhere is faster than ours
    import cuda.bindings.driver  # noqa: F401
if "cuda.bindings" not in sys.modules:
    sys.modules["cuda.bindings"] = SimpleNamespace(driver=DRIVER)  # type: ignore[assignment]
torch.cuda.current_device = lambda: 0
torch.cuda.is_current_stream_capturing = lambda: False
torch.cuda.Stream = lambda device, priority=0: SimpleNamespace(cuda_stream=COPY)  # type: ignore[misc]
torch.cuda.Event = lambda: SimpleNamespace(record=lambda stream: None, cuda_event=fake_driver.EVENT)  # type: ignore[misc]
torch._C._cuda_getCurrentRawStream = lambda device: CALLERS

from flux_megatron import ops, pieces, settings
from flux_megatron.kernels import launch, native_launch, triton_launch
from flux_megatron.kernels.hopper import config as hopper_config
from flux_megatron.kernels.hopper import gemm as hopper_gemm
from flux_megatron.kernels.hopper import probe as hopper_probe
from flux_megatron.nn import functions as layers
from flux_megatron.overlap import calls, fused, library_gemm, low_latency
from flux_megatron.overlap.calls import InFlight
from flux_megatron.problem import Plan, Tile, own_fields
from flux_megatron.scaling import block_shapes
from flux_megatron.symm import agreement, objects, places, workspace, workspaces
from flux_megatron.symm import device as devices
from flux_megatron.symm.cuda_backend import CudaCopyEngine

objects.all_gather = lambda mine, group: [mine] * group.size()
places.is_fake = lambda group: False  # the pretended rank counts
CudaCopyEngine.hold = lambda self, *tensors: None  # type: ignore[method-assign]  # it has no stream
agreement.Agreement._exchange = lambda self, text: [text] * self._world_size  # type: ignore[method-assign]
workspace.Workspace.end = lambda self, call: call.channel.end(call)  # type: ignore[method-assign]
workspace.capturing = lambda device: torch.cuda.is_current_stream_capturing()
launch.supports_tensors = lambda dtype, device: None
launch.sms = lambda device: SMS
launch.persistent_grid = lambda device, tiles, spare_sms=0: (min(SMS - spare_sms, tiles),)
hopper_gemm._refused = lambda *given: None
library_gemm._in_library = lambda x, scaling: True


@cache
def scratch(size: int) -> torch.Tensor:
    """Where kernels make descriptors."""
    return torch.empty(size, dtype=torch.int8)


triton_launch._descriptor_memory = lambda size, alignment, stream: scratch(size)

TILE = replace(hopper_config.TILE, group_m=16)
fused._interpreted_tile = lambda problem: TILE  # of calls without a plan
PLANS = {
    "hopper ag_gemm": Plan("hopper", tile=TILE),
    "hopper ag_gemm, rows in parts of K": Plan("hopper", tile=TILE, k_parts=4),
    "hopper gemm_rs": Plan("hopper", comm_rows=512, tile=TILE, transport="copy_engine"),
    "hopper gemm_rs, by SM": Plan("hopper", comm_rows=128, tile=TILE, transport="sm"),
    "fused ag_gemm": Plan("fused", comm_rows=512, tile=TILE),
    "fused gemm_rs": Plan("fused", tile=TILE),
    "pipelined ag_gemm": Plan("pipelined", comm_rows=512),
    "pipelined ag_gemm, one GEMM": Plan("pipelined", gemms=1),
    "pipelined gemm_rs": Plan("pipelined"),
    "pipelined gemm_rs, halves": Plan("pipelined", comm_rows=512),
    "pipelined gemm_rs, one GEMM": Plan("pipelined", gemms=1),
}
WITH_TILES = {
    name: Plan(**own_fields({"strategy": name, "tile": TILE}))
    for name in ("hopper", "fused", "pipelined")
}
for _strategy, _plan in WITH_TILES.items():
    PLANS[f"{_strategy} lent rows"] = PLANS[f"{_strategy} backward"] = _plan
FEW = Plan("low_latency", tile=Tile(16, 64, 64, num_warps=4))
PLANS |= {
    "low_latency ag_gemm": FEW,
    "low_latency ag_gemm, TMA": replace(FEW, tile=replace(FEW.tile, tma=True)),
    "low_latency gemm_rs": FEW,
    "low_latency gemm_ar": FEW,
    "low_latency gemm_ar, two phases": replace(FEW, two_phase=True),
    "low_latency lent rows": FEW,
    "low_latency backward": FEW,
}
for _strategy, _plan in WITH_TILES.items():
    PLANS[f"{_strategy} gemm_ar"] = _plan
for _way, _how in (("by SM", "sm"), ("exchanged", "exchange"), ("by engines", "engines")):
    PLANS[f"hopper gemm_ar, {_way}"] = replace(PLANS["hopper gemm_ar"], transport=_how)
low_latency.default_plan = lambda problem: FEW
for _layer in ("column layer", "row layer", "column layer, evaluated", "row layer, evaluated"):
    PLANS[f"hopper {_layer}"] = Plan("hopper", tile=TILE)
FP8_TILE = replace(hopper_config.NARROW, block_k=128)
PLANS["hopper ag_gemm, FP8"] = Plan("hopper", tile=FP8_TILE)
PLANS["hopper gemm_rs, FP8"] = Plan("hopper", comm_rows=512, tile=FP8_TILE, transport="copy_engine")
PLANS["pipelined ag_gemm, FP8 in blocks"] = PLANS["pipelined ag_gemm"]
PLANS["pipelined gemm_rs, FP8"] = PLANS["pipelined gemm_rs"]
PLANS["pipelined beside, FP8 in blocks"] = PLANS["pipelined ag_gemm"]  # which it does not have
WITH_BIAS = (
    "hopper ag_gemm", "pipelined ag_gemm", "pipelined ag_gemm, FP8 in blocks",
    "low_latency ag_gemm, TMA",
)  # fmt: skip


def parameters_of(ptx: str) -> list[int]:
    """The sizes of a kernel's parameters, as its code declares them."""
    entry = ptx.partition(".visible .entry")[2].partition(")")[0]
    found = re.findall(r"\.param (?:\.align \d+ )?\.[a-z](\d+)[^,\n\[]*(?:\[(\d+)\])?", entry)
    return [int(count) if count else int(bits) // 8 for bits, count in found]


_layout_of = native_launch.layout_of
SIZES: dict[int, list[int]] = {}  # by function


def known(name: str, compiled: Any, *given: Any) -> Any:
    """The driver knows the sizes of a kernel's parameters; ours, of those in lists."""
    SIZES[compiled.function] = parameters_of(compiled.asm["ptx"])
    DRIVER.expect_parameters(compiled.function, *SIZES[compiled.function])
    return _layout_of(name, compiled, *given)


native_launch.layout_of = known


OF_TORCH: list[list] = []  # operands of its kernels


def by_torch(*operands: torch.Tensor | None, out: torch.Tensor | None = None) -> None:
    """A kernel of torch's comes to the caller's stream. Nothing is computed."""
    tensors = [one for one in (*operands, out) if one is not None]
    assert DRIVER.by_torch(CALLERS, *[one.data_ptr() for one in tensors]) == 0
    OF_TORCH.append([[[*one.shape], one.stride(), str(one.dtype)] for one in tensors])


def scaled_by_torch(*operands: Any, bias: Any, out: Any, **options: Any) -> None:
    by_torch(*operands, bias, out=out)


def wgrad(gathered: torch.Tensor) -> None:
    """What a layer enqueues while it borrows gathered rows."""
    torch.mm(gathered, gathered)


class Call:
    """The calls of one plan. Their operands, and what they make, stay where they are."""

    def __init__(self, name: str, bias: bool, more_rows: int = 0) -> None:
        self.plan, self.group = PLANS[name], dist.group.WORLD
        few = self.plan.strategy == "low_latency"
        rows = (FEW_ROWS if few else M_SHARD) + more_rows
        self.x, self.dy = matrix(rows, K), matrix(2 * rows, N)
        self.rows, self.w = matrix(2 * rows, K), matrix(N, K)
        self.bias = torch.zeros(N, dtype=torch.bfloat16) if bias else None
        self.scales = {}
        if "FP8" in name:
            operands = self.x, self.rows, self.w
            self.x, self.rows, self.w = (one.to(torch.float8_e4m3fn) for one in operands)
            self.scales = {"x_scale": torch.ones(1), "w_scale": torch.ones(1)}
            if name.endswith("in blocks"):
                shapes = block_shapes(rows, N, K)
                self.scales = dict(zip(self.scales, map(torch.ones, shapes), strict=True))
        kind = re.split(r"[ ,]+", name)[1]
        self.call = {
            "ag_gemm": self.ag_gemm, "gemm_rs": self.gemm_rs, "gemm_ar": self.gemm_ar,
            "lent": self.lent_rows, "beside": self.rows_beside,
            "backward": self.column_backward, "column": self.column_layer, "row": self.row_layer,
        }[kind]  # fmt: skip
        self.differentiates = name.endswith("layer")
        for tensor in (self.x, self.rows, self.w):
            if self.differentiates:
                tensor.requires_grad_()

    def __call__(self) -> torch.Tensor:
        return self.call()

    def ag_gemm(self) -> torch.Tensor:
        return ops.all_gather_gemm(
            self.x, self.w, self.group, bias=self.bias, plan=self.plan, **self.scales
        )

    def gemm_rs(self) -> torch.Tensor:
        return ops.gemm_reduce_scatter(self.rows, self.w, self.group, plan=self.plan, **self.scales)

    def gemm_ar(self) -> torch.Tensor:
        return ops.gemm_all_reduce(self.rows, self.w, self.group, plan=self.plan)

    def lent_rows(self) -> torch.Tensor:
        """As backward of a row layer."""
        return ops.run_ag_gemm(self.x, self.w, None, self.group, plan=self.plan, consume=wgrad)

    def rows_beside(self) -> torch.Tensor:
        """As what is gathered for weights' gradients of FP8."""
        gather = pieces.start_gather_beside(self.x, self.scales["x_scale"], self.group)
        wgrad(gather.complete())
        scales = gather.complete()
        by_torch(scales, out=scales.new_empty(scales.shape))
        gather.finish()
        return scales

    def column_backward(self) -> torch.Tensor:
        gather, scatter = pieces.start_gather_and_gemm_rs(self.x, self.dy, self.w, self.group)
        wgrad(gather.complete())
        gather.close()
        return scatter.finish()

    def column_layer(self) -> torch.Tensor:
        return layers.column_parallel_linear(self.x, self.w, None, group=self.group)

    def row_layer(self) -> torch.Tensor:
        return layers.row_parallel_linear(self.rows, self.w, group=self.group)


def matrix(rows: int, columns: int) -> torch.Tensor:
    return torch.zeros(rows, columns, dtype=torch.bfloat16)


def enqueued(call: Call) -> dict[str, Any]:
    """What a call enqueues, the kernels' parameters, the tensors that it makes, and whether a list
    made it.
    """
    made: dict[tuple, torch.Tensor] = KEPT.setdefault(call.plan.dumps(), {})
    new, lists, sizes = torch.Tensor.new_empty, [], []
    begin = InFlight.__init__

    def kept(like: torch.Tensor, *shape: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        if dtype is torch.int8:
            return scratch(*shape[0])
        key = (str(shape).strip("(),"), dtype or like.dtype)
        sizes.append(str(key))
        return made.setdefault(key, new(like, *shape, dtype=dtype)).detach()

    def noted(self: InFlight, *given: Any) -> None:
        begin(self, *given)
        lists.append(self._lists is not None)

    before = DRIVER.word("fake_launches").value
    OF_TORCH.clear()
    with (
        mock.patch.multiple(torch.Tensor, new_empty=kept, add_=by_torch, copy_=by_torch),
        mock.patch.object(InFlight, "__init__", noted),
        mock.patch.multiple(torch, mm=by_torch, _scaled_mm=scaled_by_torch),
    ):
        call()
    shapes = iter(OF_TORCH)
    done = [(*one, *next(shapes)) if one[0] == "torch" else one for one in DRIVER.done()]
    functions = [one[2] for one in done if one[0] == "launch"]
    given = [DRIVER.parameters(sum(SIZES.get(f, ())), before + n) for n, f in enumerate(functions)]
    return {
        "by_list": bool(lists) and all(lists), "done": done, "made": sizes,
        "given": [one.hex() for one in given],
    }  # fmt: skip


KEPT: dict[str, dict[tuple, torch.Tensor]] = {}


@contextlib.contextmanager
def engine(native: bool) -> Iterator[None]:
    rank_pool.forget()
    devices.copy_engine.cache_clear()
    engine = CudaCopyEngine(torch.device("cuda", 0))
    engine.runs_lists = native
    devices._engine = lambda device: engine
    yield


def main(path: str) -> None:
    hopper_probe.compile_kernels("cpu")  # what asks an unknown Triton for its code
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    written: dict[str, Any] = {}
    for name in PLANS:
        of_engines = {}
        os.environ["FLUX_MEGATRON_STRATEGY"] = PLANS[name].strategy  # of calls without a plan
        settings.reload()
        call = Call(name, bias=name in WITH_BIAS)
        for kind in ("compile", "python", "native"):
            with engine(kind != "python"), torch.set_grad_enabled(call.differentiates):
                for _ in range(2):
                    enqueued(call)  # the channel is there, kernels are compiled, the call is known
                for which, channel in workspaces.workspaces()[0].channels.items():
                    channel.epoch = FIRST_EPOCHS[which] - 1
                of_engines[kind] = [enqueued(call) for _ in range(8)]
                if kind == "native":
                    with mock.patch.object(calls, "is_watched", return_value=True):
                        of_engines["watched"] = [enqueued(call) for _ in range(2)]
                    with mock.patch.object(triton_launch, "has_hooks", return_value=True):
                        of_engines["triton"] = [enqueued(call) for _ in range(2)]
        written[name] = of_engines
    Path(path).write_text(json.dumps(written))
    sys.stdout.flush()
    os._exit(0)  # the pretended group has nothing to end


if __name__ == "__main__":
    main(sys.argv[1])

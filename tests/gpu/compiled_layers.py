"""An MLP under sequence parallelism by torch.compile: ours eager, compiled and as CUDA graphs,
beside plain collectives and PyTorch's own asynchronous tensor parallelism, compiled.

    torchrun --nproc-per-node=2 tests/gpu/compiled_layers.py out.jsonl --commit COMMIT
    TRITON_INTERPRET=1 torchrun --nproc-per-node=2 tests/gpu/compiled_layers.py out --device cpu

Llama-2-70B's MLP with relu for an activation, forward and backward, at several M. First every arm
of ours has the bits of the eager one, in steps on new data with one rank late, and the others are
as near to it as bf16 rounds: otherwise the run ends with exit code 1. Then all arms race. A line an
arm: us of a step, graphs that torch.compile made, and which fused operators its code calls: without
`fused_all_gather_matmul` that of `torch_async_tp` has only plain collectives.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import gpu_run
import torch
import torch.distributed as dist
import typer
from gpu_run import Run
from torch import Tensor

from flux_megatron.nn.functions import column_parallel_linear, row_parallel_linear
from flux_megatron.tuning.timing import race

STEPS = {"cuda": 6, "cpu": 2}
SIZES = {"cuda": (8192, 28672), "cpu": (8, 16)}  # hidden and FFN size
LATE_CYCLES = 2_000_000
NEAR = 2**-6  # of the norm: bf16 rounds to 2^-9, and orders of sums differ
OURS, TORCH, COMPILED, GRAPHS = "ours", "torch", "compiled", "graphs"
FUSED = r"fused_all_gather_matmul|fused_matmul_reduce_scatter|flux_megatron\.\w+"

functional: Any = importlib.import_module("torch.distributed._functional_collectives")
ASYNC_TP = {"_micro_pipeline_tp": True, "fx_graph_cache": False}

Block = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(group: dist.ProcessGroup, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    h = column_parallel_linear(x, up, None, group=group).relu()
    return row_parallel_linear(h, down, group=group)


def plain(name: str, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """By functional collectives, which torch's asynchronous tensor parallelism looks for."""
    h = (functional.all_gather_tensor_autograd(x, 0, name) @ up.t()).relu()
    return functional.reduce_scatter_tensor_autograd(h @ down.t(), "sum", 0, name)


class Step:
    """Operands of one M on this rank, and forward and backward of a block of them."""

    def __init__(self, run: Run, M: int) -> None:
        hidden, ffn = SIZES[run.device.type]
        R, dtype = run.group.size(), getattr(torch, run.about.dtype)
        self._made = torch.Generator(run.device).manual_seed(1 + run.group.rank())
        options = {"device": run.device, "dtype": dtype}
        self.x = torch.empty(M // R, hidden, **options)
        self.dy = torch.empty(M // R, hidden, **options)
        self.up, self.down = (
            torch.empty(shape, **options).normal_(0, shape[1] ** -0.5, generator=self._made)
            for shape in ((ffn // R, hidden), (hidden, ffn // R))
        )
        for tensor in (self.x, self.up, self.down):
            tensor.requires_grad_()
            # as parameters of a module: otherwise each replay of a graph copies them
            torch._dynamo.mark_static_address(tensor)

    def renew(self) -> None:
        """New data in place."""
        with torch.no_grad():
            for tensor in (self.x, self.dy):
                tensor.normal_(generator=self._made)

    def run(self, block: Block) -> tuple[Tensor, ...]:
        """y, dx and both dw."""
        if torch.cuda.is_available():  # what a graph has returned may be overwritten from here on
            torch.compiler.cudagraph_mark_step_begin()
        operands = (self.x, self.up, self.down)
        y = block(*operands)
        return y, *torch.autograd.grad(y, operands, self.dy)


def arms(run: Run) -> dict[str, Block]:
    on_gpu, name = run.device.type == "cuda", run.group.group_name
    compile = partial(torch.compile, fullgraph=True, dynamic=False)
    backend = "inductor" if on_gpu else "aot_eager"
    mine, others = partial(ours, run.group), partial(plain, name)
    made = {
        f"{OURS}_eager": mine,
        f"{OURS}_{COMPILED}": compile(mine, backend=backend),
        f"{TORCH}_eager": others,
        f"{TORCH}_{COMPILED}": compile(others, backend=backend),
    }
    if on_gpu:
        made[f"{OURS}_{GRAPHS}"] = compile(mine, mode="reduce-overhead")
        symm_mem: Any = importlib.import_module("torch.distributed._symmetric_memory")
        symm_mem.enable_symm_mem_for_group(name)
        made[f"{TORCH}_async_tp"] = compile(others, options=ASYNC_TP)
    return made


def prepare(step: Step, block: Block, about: dict[str, Any]) -> None:
    """Compile a block: how many graphs that makes, and the fused operators that its code calls."""
    torch._dynamo.utils.counters.clear()
    utils: Any = importlib.import_module("torch._inductor.utils")
    _, codes = utils.run_and_get_code(step.run, block)
    names = sorted({found for code in codes for found in re.findall(FUSED, code)})
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    about.update(graphs=graphs, fused=", ".join(names))


def verify(run: Run, step: Step, blocks: dict[str, Block]) -> str:
    """The arms that are wrong on some rank."""
    wrong = dict.fromkeys(blocks, 0.0)
    for late in range(STEPS[run.device.type]):
        step.renew()
        expected = [one.clone() for one in step.run(blocks[f"{OURS}_eager"])]
        for name, block in blocks.items():
            if run.device.type == "cuda" and late % run.group.size() == run.group.rank():
                torch.cuda._sleep(LATE_CYCLES)
            for one, right in zip(step.run(block), expected, strict=True):
                if name.startswith(OURS):
                    wrong[name] += float((one != right).sum())
                else:
                    wrong[name] += float((one - right).norm() > NEAR * right.norm())
    found = run.slowest(torch.tensor([*wrong.values()])).tolist()
    return ", ".join(name for name, count in zip(wrong, found, strict=True) if count)


def measure(run: Run, M: int, rounds: int) -> str:
    """Verify and race the arms at one M; those that are wrong."""
    step, blocks = Step(run, M), {}
    step.renew()
    about: dict[str, dict[str, Any]] = {}
    for name, block in arms(run).items():
        about[name] = {}
        if failure := run.failure(partial(prepare, step, block, about[name])):
            run.say(f"{M:6} {name:16} fails: {failure[:300]}")
            run.row("compiled_layers", M=M, arm=name, status="failed", reason=failure[:300])
        else:
            blocks[name] = block
    if f"{OURS}_eager" not in blocks:
        return f"{OURS}_eager"
    if wrong := verify(run, step, blocks):
        return wrong
    if missing := {f"{OURS}_eager", f"{OURS}_{COMPILED}"} - blocks.keys():
        return ", ".join(missing)
    calls = {name: partial(step.run, block) for name, block in blocks.items()}
    result = race(calls, group=run.group, device=run.device, rounds=rounds)
    for name in result.times_us:
        us = result.median_us(name)
        run.row("compiled_layers", M=M, arm=name, status="ok", median_us=us, **about[name])
        graphs, fused = about[name].values()
        run.say(f"{M:6} {name:16}{us:10.0f} us  {graphs} graphs  {fused}")
    for name, failure in result.failures.items():
        run.say(f"{M:6} {name:16} fails: {failure[:300]}")
    return ""


def main(
    out: Path, commit: str = "", device: str = "cuda",
    M: Annotated[str, typer.Option("--M")] = "8192,2048",
    rounds: int = 12, seconds: float = 75,
) -> None:  # fmt: skip
    """Be one of the ranks. One M after the other, until `seconds` are over."""
    small = device == "cpu"
    run = gpu_run.start_on(device, out, commit, seconds)
    for rows in (16,) if small else map(int, M.split(",")):
        if not run.time_left():
            run.say("no time for the others")
            break
        if wrong := measure(run, rows, 1 if small else rounds):
            run.say(f"{rows} WRONG: {wrong}")
            gpu_run.finish(run, 1)
    gpu_run.finish(run)


if __name__ == "__main__":
    typer.run(main)

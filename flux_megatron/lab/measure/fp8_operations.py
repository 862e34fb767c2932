"""FP8 operations, beside the library's FP8 GEMM and NCCL: right first, then timed.

    torchrun --nproc-per-node=2 -m flux_megatron.lab.measure.fp8_operations out.jsonl \
        --commit COMMIT
    torchrun --nproc-per-node=2 -m flux_megatron.lab.measure.fp8_operations out.jsonl \
        --cases "ag_gemm 2048x8192x4096"
    TRITON_INTERPRET=1 torchrun \
        --nproc-per-node=2 -m flux_megatron.lab.measure.fp8_operations out.jsonl --device cpu

A case is a pattern and local M x N x K of w [N, K], for every M of `--rows` where it says 0, with a
fast and with a split accumulator; with `--kinds blockwise` with blockwise scales, beside
TransformerEngine's GEMM, if that is there; with `wire`, of GEMM+RS, with partial sums in e4m3. Each
call is exact on small integers; on random numbers its error against fp64 is at most 1.5 times that
of the library's GEMM with the same accumulation, with `wire` at most a 16th of the largest result.
Then all race: `gemm` is the library's without communication, `hopper_gemm` ours, `serial` NCCL's
collective and `gemm`, `rule` ours by the first plan, and `ours` by the plan that a call gets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

import torch
import torch.distributed as dist
import typer
from torch import Tensor

from flux_megatron import ops
from flux_megatron.dispatch import decide
from flux_megatron.lab.bench import operations
from flux_megatron.lab.measure import gpu_run
from flux_megatron.lab.measure.gpu_run import Run
from flux_megatron.overlap import fused, hopper, library_gemm, pipelined
from flux_megatron.problem import Pattern, Plan, Problem
from flux_megatron.scaling import BLOCK, Scaling, block_shapes, scales_of

E4M3, OUT = torch.float8_e4m3fn, torch.bfloat16
CASES = (
    "ag_gemm 0x24576x12288,gemm_rs 0x12288x24576,ag_gemm 0x28672x8192,gemm_rs 0x8192x28672,"
    "ag_gemm 0x8192x4096,gemm_rs 0x4096x8192,ag_gemm 0x14336x4096,gemm_rs 0x4096x14336"
)
SMALL = "ag_gemm 32x32x48,gemm_rs 32x48x32"
CLOSE = 1.5  # times the library's error
WIRE = 2.0**-4  # of the largest result: what e4m3 rounds a partial sum by, at most
WIRE_K = 8  # whose sums of ones e4m3 has
SAMPLE = 256  # rows of a rank whose error is taken
STANDARD_DEVIATION = 64  # of stored values, of which 448 is the largest


class Layer:
    """Operands on this rank."""

    def __init__(self, run: Run, case: str, kind: str) -> None:
        pattern, sizes = case.split()
        self.M, N, self.K = map(int, sizes.split("x"))
        self.group, self.kind, self.device = run.group, kind, run.device
        self.split, self.blockwise = kind in ("split", "blockwise"), kind == "blockwise"
        self.wire = kind == "wire"
        self.R, self.rank = run.group.size(), run.group.rank()
        self.gathers = Pattern(pattern).spec.gathers
        self._made = torch.Generator(run.device).manual_seed(1 + self.rank)
        rows = self.M // self.R if self.gathers else self.M
        self.x = torch.zeros(rows, self.K, device=run.device).to(E4M3)
        self.w = torch.zeros(N, self.K, device=run.device).to(E4M3)
        self.scattered = torch.empty(self.M // self.R, N, device=run.device, dtype=OUT)
        self.problem = Problem.of_operands(
            Pattern(pattern), rows, N, self.K, "float8_e4m3fn", self.R, "nt", run.device.type,
            out_dtype="bfloat16", split_accumulator=self.split, blockwise=self.blockwise,
            wire=self.wire,
        )  # fmt: skip
        kernels = hopper if run.device.type == "cuda" else fused
        strategy = pipelined if self.blockwise else kernels
        reason = strategy.supports(self.problem)
        assert reason is None, reason
        self.plan = strategy.default_plan(self.problem)

    def draw_integers(self) -> None:
        operations.fill(self._made, self.x, self.w)
        if self.wire:
            self.x.view(torch.uint8)[:, WIRE_K:] = 0
        self._scales(2.0, 0.5 if self.gathers else 0.5 / (1 + self.rank))

    def draw_random(self) -> None:
        for tensor in (self.x, self.w):
            drawn = torch.empty(tensor.shape, device=self.device, dtype=torch.half)
            tensor.copy_(drawn.normal_(std=STANDARD_DEVIATION, generator=self._made))
        own = 0.023 * (1 + self.rank)
        self._scales(0.71 / STANDARD_DEVIATION, own / STANDARD_DEVIATION)

    def _scales(self, x: float, w: float) -> None:
        own = 1 if self.gathers else 1 + self.rank  # all ranks have one scale of gathered rows
        self.x_scale = torch.tensor([x * own], device=self.device)
        self.w_scale = torch.tensor([w], device=self.device)
        if self.blockwise:
            self._block_scales(x, w)
        how = self.split, self.blockwise, self.wire
        self.scaling = Scaling(self.x_scale, self.w_scale, OUT, *how)
        self.gathered, self.all_scales = self.x, self.x_scale
        if self.gathers:
            self.gathered = torch.empty(self.M, self.K, device=self.device, dtype=E4M3)
            self.gather()

    def _block_scales(self, x: float, w: float) -> None:
        """Powers of two, times the scale: of another in each row, N and 128 of K. That of K is in x
        what is missing in w, so that bf16 has the sums of integers, over the ranks too.
        """
        alike = torch.Generator(self.device).manual_seed(0)
        (blocks, rows), (n, padded) = block_shapes(len(self.x), *self.w.shape)

        def powers(count: int, generator: torch.Generator) -> Tensor:
            drawn = torch.randint(-2, 3, (count,), device=self.device, generator=generator)
            return drawn.float().exp2()

        of_k, of_rows = powers(padded, alike), powers(rows, self._made)
        if not self.gathers:
            of_k, of_rows = powers(padded, self._made), powers(rows, alike)
        self.x_scale = x * of_rows * of_k[:blocks, None]
        self.w_scale = w * powers(n, alike)[:, None] / of_k

    def gather(self) -> None:
        bytes_ = self.gathered.view(torch.uint8), self.x.view(torch.uint8)
        dist.all_gather_into_tensor(*bytes_, group=self.group)
        if self.blockwise:
            blocks, rows = self.x_scale.shape
            shards = self.x_scale.new_empty(self.R * blocks, rows)
            dist.all_gather_into_tensor(shards, self.x_scale, group=self.group)
            self.all_scales = scales_of(shards, self.K, len(self.x))

    def gemm(self) -> Tensor:
        if self.blockwise and self.device.type == "cuda":
            return blockwise_gemm(self.gathered, self.all_scales, self.w, self.w_scale)
        scaling = self.scaling._replace(x=self.all_scales)
        return library_gemm.scaled_gemm(self.gathered, self.w, None, scaling)

    def serial(self) -> Tensor:
        if self.gathers:
            self.gather()
            return self.gemm()
        dist.reduce_scatter_tensor(self.scattered, self.gemm(), group=self.group)
        return self.scattered

    def call(self, plan: Plan | None = None) -> Tensor:
        scaling = self.scaling
        if self.gathers:
            return ops.run_ag_gemm(self.x, self.w, None, self.group, plan=plan, scaling=scaling)
        return ops.run_gemm_rs(self.x, self.w, self.group, plan=plan, scaling=scaling)

    def chosen(self) -> Plan:
        """That of a call without one."""
        given = self.problem.pattern, self.x, self.w, None, self.group, "nt", None, self.scaling
        return decide(*given).plan

    def hopper_gemm(self) -> Tensor:
        from flux_megatron.kernels.hopper import ag_gemm as hopper_ag_gemm

        return hopper_ag_gemm.gemm(self.gathered, self.w, "nt", self.plan.tile, self.scaling)

    def candidates(self) -> dict[str, Callable[[], Tensor]]:
        calls = {"gemm": self.gemm, "serial": self.serial, "ours": self.call}
        if not self.blockwise and not self.wire:  # they are raced
            calls["rule"] = partial(self.call, self.plan)
        return {name + self.suffix: call for name, call in calls.items()}

    @property
    def suffix(self) -> str:
        return "" if self.kind == "fast" else f"_{self.kind}"

    def sampled(self) -> tuple[Tensor, Tensor]:
        """Rows of y on this rank, and what fp64 gives there."""
        shard = self.M if self.gathers else self.M // self.R
        rows = torch.linspace(0, shard - 1, min(SAMPLE, shard), device=self.device).long()
        stored = self.gathered.view(torch.uint8).view(-1, shard, self.K)  # which can be indexed
        x, w = stored[:, rows].view(E4M3).double(), self.w.double()
        if self.blockwise:
            k = torch.arange(self.K, device=self.device) // BLOCK
            x *= self.all_scales[k].t().reshape(-1, shard, self.K)[:, rows]
            w *= self.w_scale[torch.arange(len(w), device=self.device) // BLOCK][:, k]
        else:
            w *= self.x_scale.double() * self.w_scale.double()
        exact = x @ w.t()
        if not self.gathers:
            dist.all_reduce(exact, group=self.group)
        return rows, exact[0 if self.gathers else self.rank]


def blockwise_gemm(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor) -> Tensor:
    """By TransformerEngine, or torch where there is none."""
    try:
        te = te_gemm()
    except ImportError:
        return library_gemm.scaled_gemm(x, w, None, Scaling(x_scale, w_scale, OUT, True, True))
    return te(x, x_scale, w, w_scale)


@cache
def te_gemm() -> Callable[..., Tensor]:
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.cpp_extensions import general_gemm
    from transformer_engine.pytorch.tensor import float8_blockwise_tensor as blocks

    dtype = tex.DType.kFloat8E4M3

    def stored(data: Tensor, scale: Tensor, dims: int) -> object:
        quantizer = blocks.Float8BlockQuantizer(
            dtype, rowwise=True, columnwise=False, block_scaling_dim=dims
        )
        return blocks.Float8BlockwiseQTensorStorage(
            rowwise_data=data.view(torch.uint8), rowwise_scale_inv=scale, columnwise_data=None,
            columnwise_scale_inv=None, fp8_dtype=dtype, quantizer=quantizer,
            is_2D_scaled=dims == 2,
        )  # fmt: skip

    def gemm(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor) -> Tensor:
        y: Tensor = general_gemm(stored(w, w_scale, 2), stored(x, x_scale, 1), out_dtype=OUT)[0]
        return y

    return gemm


def verified(run: Run, case: str, layer: Layer) -> bool:
    """Whether this rank's and every other's results are right. Collective."""
    layer.draw_integers()
    expected = layer.serial().clone()
    wrong = torch.tensor([float((layer.call() != expected).sum()) for _ in range(6)])
    layer.draw_random()
    rows, exact = layer.sampled()
    results = [call() for call in (layer.call, layer.serial)]
    errors = [(one[rows] - exact).abs().max() for one in results]
    unequal = (results[0] != results[1]).sum()
    ours, library, bits = run.slowest(torch.stack([*errors, unequal])).tolist()
    kind, allowed = layer.kind, CLOSE * library
    if layer.wire:
        allowed = WIRE * float(run.slowest(exact.abs().max()[None]))
    failed = bool(run.slowest(wrong).any()) or not ours <= allowed
    run.say(
        f"{'WRONG' if failed else 'right'} {case} {kind}: {wrong.tolist()} integers differ; error "
        f"{ours:.3g}, the library's {library:.3g}; {bits:.0f} have other bits"
    )
    run.row(
        "fp8_errors", case=case, kind=kind, error=ours, library=library, wrong=failed, bits=bits
    )
    return not failed


def bounds(name: str, us: Mapping[str, float]) -> tuple[float, float]:
    """`serial` and the faster GEMM, of the same accumulation."""
    kind = next((one for one in ("_split", "_blockwise", "_wire") if name.endswith(one)), "")
    gemm = min(us[f"gemm{kind}"], us.get(f"hopper_gemm{kind}", float("inf")))
    return us[f"serial{kind}"], gemm


def measure(
    run: Run, case: str, rounds: int, beside: bool = False, kinds: Sequence[str] = ("fast", "split")
) -> bool:
    """Whether all is right; only then it is timed."""
    of_case = [kind for kind in kinds if kind != "wire" or case.startswith("gemm_rs")]
    layers = [Layer(run, case, kind) for kind in of_case]
    if not all(verified(run, case, one) for one in layers):
        return False
    calls = {name: call for one in layers for name, call in one.candidates().items()}
    if run.device.type == "cuda":
        ours = [one for one in layers if not one.blockwise]
        calls |= {"hopper_gemm" + one.suffix: one.hopper_gemm for one in ours}
    plans = {"ours" + one.suffix: one.chosen().dumps() for one in layers}
    plans |= {"rule" + one.suffix: one.plan.dumps() for one in layers}
    run.say(case)
    return gpu_run.race_rows(
        run, "fp8_operations", calls, rounds, beside, bounds,
        lambda name: {"case": case, "candidate": name, "plan": plans.get(name, "")},
    )  # fmt: skip


def main(
    out: Path, commit: str = "", device: str = "cuda", cases: str = CASES,
    rows: str = "8192,4096,2048", rounds: int = 10, seconds: float = 85, beside: bool = False,
    kinds: str = "fast,split",
) -> None:  # fmt: skip
    """Be one of the ranks."""
    run = gpu_run.start_on(device, out, commit, seconds, beside)
    small = device == "cpu"
    given = (SMALL if small else cases).split(",")
    each = dict.fromkeys(case.replace(" 0x", f" {M}x") for M in rows.split(",") for case in given)
    rounds = 1 if small else rounds
    gpu_run.measure_each(
        run, each, lambda case: measure(run, case, rounds, beside, kinds.split(","))
    )


if __name__ == "__main__":
    typer.run(main)

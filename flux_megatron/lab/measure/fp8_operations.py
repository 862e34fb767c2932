"""FP8 operations of `hopper`, beside the library's FP8 GEMM and NCCL: right first, then timed.

    torchrun --nproc-per-node=2 -m flux_megatron.lab.measure.fp8_operations out.jsonl \
        --commit COMMIT
    torchrun --nproc-per-node=2 -m flux_megatron.lab.measure.fp8_operations out.jsonl \
        --cases "ag_gemm 2048x8192x4096"
    TRITON_INTERPRET=1 torchrun \
        --nproc-per-node=2 -m flux_megatron.lab.measure.fp8_operations out.jsonl --device cpu

A case is a pattern and local M x N x K of w [N, K], for every M of `--rows` where it says 0. Each
call is exact on small integers; on random numbers its error against fp64 is at most 1.5 times that
of the library's GEMM with the same accumulation. Then all race: `gemm` is the library's without
communication, `hopper_gemm` ours, `serial` NCCL's collective and `gemm`. Behind the cases come
small ones of other dtypes and ragged sizes, untimed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import typer
from torch import Tensor

from flux_megatron import ops
from flux_megatron.lab.measure import gpu_run
from flux_megatron.lab.measure.gpu_run import Run
from flux_megatron.overlap import fused, hopper, sequential
from flux_megatron.problem import Pattern, Problem
from flux_megatron.scaling import Scaling

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CASES = (
    "ag_gemm 0x24576x12288,gemm_rs 0x12288x24576,ag_gemm 0x28672x8192,gemm_rs 0x8192x28672,"
    "ag_gemm 0x8192x4096,gemm_rs 0x4096x8192,ag_gemm 0x14336x4096,gemm_rs 0x4096x14336"
)
SMALL = "ag_gemm 32x32x48,gemm_rs 32x48x32"
CLOSE = 1.5  # times the library's error
SAMPLE = 256  # rows of a rank whose error is taken
STANDARD_DEVIATION = 64  # of stored values, of which 448 is the largest


@dataclass(frozen=True)
class Kind:
    x_dtype: torch.dtype = E4M3
    out_dtype: torch.dtype = torch.bfloat16
    split: bool = False
    bias: bool = False


# with sizes of a shard that are no multiple of a tile's, or below one
OTHERS = [
    ("ag_gemm 1200x528x1040", Kind(E5M2, torch.float16, split=True, bias=True)),
    ("gemm_rs 1200x528x1040", Kind(E5M2, torch.float16, split=True)),
    ("ag_gemm 666x1024x4096", Kind(E4M3, torch.float32, bias=True)),
    ("gemm_rs 666x1024x4096", Kind(E4M3, torch.float32)),
    ("ag_gemm 140x1024x4096", Kind(bias=True)),
    ("gemm_rs 24x1040x4096", Kind()),
]


class Layer:
    """Operands on this rank."""

    def __init__(self, run: Run, case: str, kind: Kind) -> None:
        pattern, sizes = case.split()
        self.M, self.N, self.K = map(int, sizes.split("x"))
        self.group, self.kind, self.device = run.group, kind, run.device
        self.R, self.rank = run.group.size(), run.group.rank()
        self.gathers = Pattern(pattern).spec.gathers
        self._made = torch.Generator(run.device).manual_seed(1 + self.rank)
        rows = self.M // self.R if self.gathers else self.M
        self.x = torch.zeros(rows, self.K, device=run.device).to(kind.x_dtype)
        self.w = torch.zeros(self.N, self.K, device=run.device).to(E4M3)
        bias = torch.arange(self.N, device=run.device) % 7 - 3.0
        self.bias = bias.to(kind.out_dtype) if kind.bias else None
        self.problem = Problem.of_operands(
            Pattern(pattern), rows, self.N, self.K, str(kind.x_dtype)[6:], self.R, "nt",
            run.device.type, out_dtype=str(kind.out_dtype)[6:], split_accumulator=kind.split,
        )  # fmt: skip
        strategy = hopper if run.device.type == "cuda" else fused
        reason = strategy.supports(self.problem)
        assert reason is None, reason
        self.plan = strategy.default_plan(self.problem)

    def draw_integers(self) -> None:
        gpu_run.fill_whole(self._made, self.x, self.w)
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

    def scaling(self) -> Scaling:
        kind = self.kind
        return Scaling(self.x_scale, self.w_scale, kind.out_dtype, kind.split)

    def gather(self) -> Tensor:
        if not self.gathers:
            return self.x
        gathered = torch.empty(self.M, self.K, device=self.device, dtype=self.x.dtype)
        self.gather_into(gathered)
        return gathered

    def gather_into(self, gathered: Tensor) -> None:
        bytes_ = gathered.view(torch.uint8), self.x.view(torch.uint8)
        dist.all_gather_into_tensor(*bytes_, group=self.group)

    def candidates(self) -> dict[str, Callable[[], Tensor]]:
        gathered, scaling = self.gather(), self.scaling()
        dtype = self.kind.out_dtype
        scattered = torch.empty(self.M // self.R, self.N, device=self.device, dtype=dtype)

        def gemm() -> Tensor:
            return sequential.scaled_gemm(gathered, self.w, self.bias, scaling)

        def serial() -> Tensor:
            if self.gathers:
                self.gather_into(gathered)
                return gemm()
            dist.reduce_scatter_tensor(scattered, gemm(), group=self.group)
            return scattered

        return {"gemm": gemm, "serial": serial, "ours": self.call}

    def hopper_gemm(self) -> Callable[[], Tensor]:
        from flux_megatron.kernels import hopper_ag_gemm

        gathered, scaling, tile = self.gather(), self.scaling(), self.plan.tile
        return lambda: hopper_ag_gemm.gemm(gathered, self.w, "nt", tile, scaling)

    def call(self) -> Tensor:
        options = {"bias": self.bias} if self.gathers else {}
        return ops.OPERATIONS[self.problem.pattern](
            self.x, self.w, self.group, plan=self.plan, x_scale=self.x_scale, w_scale=self.w_scale,
            out_dtype=self.kind.out_dtype, split_accumulator=self.kind.split, **options,
        )  # fmt: skip

    def sampled(self) -> tuple[Tensor, Tensor]:
        """Rows of y on this rank, and what fp64 gives there."""
        shard = self.M if self.gathers else self.M // self.R
        rows = torch.linspace(0, shard - 1, min(SAMPLE, shard), device=self.device).long()
        stored = self.gather().view(torch.uint8).view(-1, shard, self.K)  # which can be indexed
        x = stored[:, rows].view(self.x.dtype)
        scale = self.x_scale.double() * self.w_scale.double()
        exact = x.to(torch.float64) @ self.w.to(torch.float64).t() * scale
        if not self.gathers:
            dist.all_reduce(exact, group=self.group)
        exact = exact[0 if self.gathers else self.rank]
        return rows, exact if self.bias is None else exact + self.bias.double()


def verified(run: Run, case: str, kind: Kind, layer: Layer) -> bool:
    """Whether this rank's and every other's results are right. Collective."""
    layer.draw_integers()
    calls = layer.candidates()
    expected = calls["serial"]().clone()
    wrong = torch.tensor([float((calls["ours"]() != expected).sum()) for _ in range(6)])
    layer.draw_random()
    calls = layer.candidates()
    rows, exact = layer.sampled()
    errors = [(calls[name]()[rows] - exact).abs().max() for name in ("ours", "serial")]
    ours, library = run.slowest(torch.stack(errors)).tolist()
    failed = bool(run.slowest(wrong).any()) or not ours <= CLOSE * library
    said = "WRONG" if failed else "right"
    run.say(
        f"{said} {case} {kind}: {wrong.tolist()} integers differ; error {ours:.3g}, the library's "
        f"{library:.3g}"
    )
    run.row("fp8_errors", case=case, kind=str(kind), error=ours, library=library, wrong=failed)
    return not failed


def bounds(name: str, us: Mapping[str, float]) -> tuple[float, float]:
    """`serial` and the faster GEMM, of the same accumulation."""
    kind = "_split" * name.endswith("_split")
    gemm = min(us[f"gemm{kind}"], us.get(f"hopper_gemm{kind}", float("inf")))
    return us[f"serial{kind}"], gemm


def measure(run: Run, case: str, rounds: int, beside: bool = False) -> bool:
    """Whether all is right; only then it is timed."""
    layer, split = Layer(run, case, Kind()), Layer(run, case, Kind(split=True))
    for one in (layer, split):
        if not verified(run, case, one.kind, one):
            return False
    calls = layer.candidates()
    calls |= {f"{name}_split": call for name, call in split.candidates().items()}
    if run.device.type == "cuda":
        calls["hopper_gemm"] = layer.hopper_gemm()
        calls["hopper_gemm_split"] = split.hopper_gemm()
    plans = {"ours": layer.plan.dumps(), "ours_split": split.plan.dumps()}
    return gpu_run.race_rows(
        run, "fp8_operations", calls, rounds, beside, bounds,
        lambda name, _: {"case": case, "candidate": name, "plan": plans.get(name, "")},
    )  # fmt: skip


def with_rows(cases: str, rows: str) -> list[str]:
    return list(
        dict.fromkeys(
            case.replace(" 0x", f" {M}x") for M in rows.split(",") for case in cases.split(",")
        )
    )


def main(
    out: Path, commit: str = "", device: str = "cuda", cases: str = CASES,
    rows: str = "8192,4096,2048", rounds: int = 10, seconds: float = 85, beside: bool = False,
) -> None:  # fmt: skip
    """Be one of the ranks."""
    run = gpu_run.start_on(device, out, commit, seconds, beside)
    small = device == "cpu"
    timed = [(case, None) for case in with_rows(SMALL if small else cases, rows)]

    def one(given: tuple[str, Kind | None]) -> bool:
        case, kind = given
        if kind is None:
            return measure(run, case, 1 if small else rounds, beside)
        return verified(run, case, kind, Layer(run, case, kind))

    gpu_run.measure_each(run, [*timed, *([] if small else OTHERS)], one)


if __name__ == "__main__":
    typer.run(main)

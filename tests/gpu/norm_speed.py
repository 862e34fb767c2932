"""Our norms beside torch's and, where it is installed, TransformerEngine's.

    python tests/gpu/norm_speed.py --out norm_speed.jsonl
    python tests/gpu/norm_speed.py --num-warps 32 --num-stages 2    other tiles than `tile_of` gives

Every norm is first compared with fp64, forward and backward; exit code 1 if one is wrong. Then all
of a case are timed in turns. They go round copies of their operands that L2 does not hold, so rows
come from memory as they do in the middle of a model.

Bandwidth counts what cannot be avoided: forward reads x and writes y, backward reads x and dy and
writes dx.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from flux_megatron import reference
from flux_megatron.kernels import norm as kernels
from flux_megatron.nn import norm
from flux_megatron.tuning import environment
from flux_megatron.tuning.timing import Race, race

SHAPES = ((2048, 12288), (4096, 8192), (1024, 12288))
KINDS = ("layer_norm", "rms_norm")
EPS = 1e-5
BEYOND_L2_BYTES = 256 * 2**20

Norm = Callable[..., Tensor]  # of x, weight and, for LayerNorm, bias


@dataclass(frozen=True)
class Case:
    kind: str
    M: int
    N: int
    dtype: torch.dtype

    def candidates(self) -> dict[str, Norm]:
        """Torch's is first: others are measured by its errors."""
        layer = self.kind == "layer_norm"
        theirs = F.layer_norm if layer else F.rms_norm
        found: dict[str, Norm] = {
            "torch": lambda x, *parameters: theirs(x, (self.N,), *parameters, eps=EPS),
            "ours": lambda *given: getattr(norm, self.kind)(*given, eps=EPS),
        }
        try:
            import transformer_engine.pytorch as te
        except ImportError:
            return found
        module = (te.LayerNorm if layer else te.RMSNorm)(
            self.N, eps=EPS, params_dtype=self.dtype, device="cuda"
        )

        def by_te(x: Tensor, *parameters: Tensor) -> Tensor:
            for name, parameter in zip(("weight", "bias"), parameters, strict=False):
                setattr(module, name, parameter)
            return module(x)

        return {**found, "transformer_engine": by_te}

    def operands(self, device: torch.device, seed: int) -> tuple[list[Tensor], Tensor]:
        """x and the parameters; dy."""
        random = torch.Generator(device).manual_seed(seed)

        def draw(*size: int) -> Tensor:
            made = torch.randn(size, generator=random, device=device).to(self.dtype)
            return torch.nn.Parameter(made)

        sizes = [(self.M, self.N), (self.N,), (self.N,)][: 3 if self.kind == "layer_norm" else 2]
        return [draw(*size) for size in sizes], draw(self.M, self.N).detach()


def wrong(case: Case, device: torch.device) -> list[str]:
    """What is further from fp64 than twice torch's error, and than two roundings."""
    leaves, dy = case.operands(device, seed=1)

    def results(function: Norm, dtype: torch.dtype) -> list[Tensor]:
        given = [torch.nn.Parameter(leaf.detach().to(dtype)) for leaf in leaves]
        y = function(*given)
        return [y.detach(), *torch.autograd.grad(y, given, dy.to(dtype))]

    expected = results(lambda *given: getattr(reference, case.kind)(*given, eps=EPS), torch.float64)
    allowed: list[float] = []
    found = []
    for name, function in case.candidates().items():
        pairs = zip(results(function, case.dtype), expected, strict=True)
        errors = [(got.double() - true).abs().max().item() for got, true in pairs]
        if not allowed:
            roundings = [2 * torch.finfo(case.dtype).eps * t.abs().max().item() for t in expected]
            allowed = [max(2 * error, r) for error, r in zip(errors, roundings, strict=True)]
        # not ">": NaN is wrong
        if not all(error <= limit for error, limit in zip(errors, allowed, strict=True)):
            found.append(f"{case} {name}: errors {errors}, allowed {allowed}")
    return found


def timed(case: Case, device: torch.device, rounds: int) -> Iterator[tuple[str, Race]]:
    """("forward", times) and ("both", times), of forward and backward: TransformerEngine's norm
    goes backward once only, so backward cannot be repeated by itself.
    """
    size_bytes = 2 * case.M * case.N * case.dtype.itemsize
    copies = 1 if device.type == "cpu" else -(-BEYOND_L2_BYTES // size_bytes) + 1
    given = [case.operands(device, seed) for seed in range(copies)]

    def forward(function: Norm) -> Callable[[], object]:
        turns = itertools.cycle(given)
        return lambda: function(*next(turns)[0])

    def both(function: Norm) -> Callable[[], object]:
        turns = itertools.cycle(given)

        def step() -> object:
            leaves, dy = next(turns)
            return torch.autograd.grad(function(*leaves), leaves, dy)

        return step

    for direction, prepared in (("forward", forward), ("both", both)):
        calls = {name: prepared(function) for name, function in case.candidates().items()}
        group = dist.group.WORLD
        assert group is not None
        yield direction, race(calls, group=group, device=device, rounds=rounds, warmup=copies)


def rows(case: Case, device: torch.device, rounds: int) -> Iterator[dict]:
    machine = asdict(environment.of(device))
    tile = kernels.tile_of(case.N)
    for direction, found in timed(case, device, rounds):
        moved = {"forward": 2, "both": 5}[direction] * case.M * case.N * case.dtype.itemsize
        for name, times_us in found.times_us.items():
            median = statistics.median(times_us)
            yield {
                "what": "norm_speed", "kind": case.kind, "direction": direction,
                "M": case.M, "N": case.N, "dtype": str(case.dtype).removeprefix("torch."),
                "candidate": name, "median_us": round(median, 2),
                "bandwidth_gbps": round(moved / median / 1e3, 1),
                "times_us": [round(t, 2) for t in times_us],
                "num_warps": tile.num_warps, "num_stages": tile.num_stages,
                "date": time.strftime("%Y-%m-%d"),
                **{key: machine[key] for key in ("gpu", "driver", "cuda", "torch", "triton")},
            }  # fmt: skip
        for name, said in found.failures.items():
            raise RuntimeError(f"{case} {direction} {name}: {said}")


def measure(
    device: torch.device, shapes=SHAPES, dtype=torch.bfloat16, rounds: int = 30
) -> Iterator[dict]:
    """Rows of every case. `AssertionError` if a norm is wrong."""
    cases = [Case(kind, M, N, dtype) for (M, N), kind in itertools.product(shapes, KINDS)]
    errors = [error for case in cases for error in wrong(case, device)]
    assert not errors, "\n".join(errors)
    for case in cases:
        yield from rows(case, device, rounds)


def main(
    out: Path | None = None, rounds: int = 30, dtype: str = "bfloat16", num_warps: int = 0,
    num_stages: int = 0,
) -> None:  # fmt: skip
    """Measure on the first GPU; print a line a row, and append the rows to `out`."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    given = {k: v for k, v in (("num_warps", num_warps), ("num_stages", num_stages)) if v}
    shipped = kernels.tile_of
    with mock.patch.object(kernels, "tile_of", lambda N: replace(shipped(N), **given)):
        for row in measure(device, dtype=getattr(torch, dtype), rounds=rounds):
            print(
                f"{row['kind']:10} {row['direction']:8} {row['M']:5} x {row['N']:5} "
                f"{row['candidate']:18} {row['median_us']:8.1f} us "
                f"{row['bandwidth_gbps']:7.0f} GB/s",
                flush=True,
            )
            if out:
                with out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    import typer

    typer.run(main)

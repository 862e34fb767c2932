"""The sizes and types that a pattern is computed on (`Problem`), and how it is computed (`Plan`).

It imports no torch: configs and cost models use it too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache
from typing import Any, ClassVar

from flux_megatron.patterns import Pattern, PatternSpec

__all__ = ["COMM_TILES_MAX", "MAX_GROUPS", "TRANSPORTS", "Pattern", "Plan", "Problem", "Tile"]


@dataclass(frozen=True)
class Problem:
    """Everything that the choice of a plan may depend on.

    `M, N, K` are the global problem y[M,N] = x[M,K] @ w, with w stored [N,K] (`layout="nt"`, a
    layer's weight in fprop) or [K,N] (`layout="nn"`, the same weight in dgrad). `dtype` is torch's
    name without the prefix. With `beside` other kernels share the GPU while the call runs.

    `dtype` is that of x. FP8 operands have scales and an `out_dtype`, "" for that of x; their w is
    always float8_e4m3fn. `split_accumulator` adds their products up in fp32 registers, `blockwise`
    with a scale for each 128 of K. With `wire` partial sums may travel in e4m3.
    """

    pattern: Pattern
    M: int
    N: int
    K: int
    dtype: str
    world_size: int
    layout: str = "nt"
    device: str = "cuda"
    beside: bool = False
    out_dtype: str = ""
    split_accumulator: bool = False
    blockwise: bool = False
    wire: bool = False

    @staticmethod
    def of_operands(
        pattern: Pattern, rows: int, N_local: int, K_local: int, dtype: str, world_size: int,
        layout: str, device: str, **more: Any,
    ) -> Problem:  # fmt: skip
        """The problem whose operands on one rank are x [rows, K_local] and w [N_local, K_local],
        with `more` of its fields.
        """
        spec = pattern.spec
        M = rows * world_size if spec.gathers else rows
        N = N_local * world_size if spec.gathers else N_local
        K = K_local * world_size if spec.reduces else K_local
        return Problem(pattern, M, N, K, dtype, world_size, layout, device, **more)

    @property
    def spec(self) -> PatternSpec:
        return self.pattern.spec

    @property
    def scaled(self) -> bool:
        """Whether its operands are FP8."""
        return self.out_dtype != ""

    @property
    def M_shard(self) -> int:
        return self.M // self.world_size

    @property
    def x_rows(self) -> int:
        """Rows of x on each rank."""
        return self.M_shard if self.spec.gathers else self.M

    @property
    def N_local(self) -> int:
        return self.N // self.world_size if self.spec.gathers else self.N

    @property
    def K_local(self) -> int:
        return self.K // self.world_size if self.spec.reduces else self.K

    @property
    def is_backward(self) -> bool:
        """Whether it is dgrad of a layer; the tuner times the layer's whole backward."""
        return self.layout == "nn"

    def of_x_rows(self, rows: int) -> Problem:
        """The same with so many rows of x on each rank, sooner than by `replace`."""
        made = object.__new__(Problem)
        M = rows * self.world_size if self.spec.gathers else rows
        made.__dict__.update(self.__dict__, M=M)
        return made

    @property
    def dual(self) -> Problem:
        """dgrad of the same layer, which reads the weight in its layout."""
        layout = "nn" if self.layout == "nt" else "nt"
        return replace(self, pattern=self.pattern.dual, N=self.K, K=self.N, layout=layout)

    def __str__(self) -> str:
        result = f"to {self.out_dtype} " if self.scaled else ""
        result += "with a split accumulator " * self.split_accumulator
        result += "and blockwise scales " * self.blockwise
        result += "and e4m3 on the wire " * self.wire
        return (
            f"{self.pattern} M={self.M} N={self.N} K={self.K} {self.layout} {self.dtype} {result}"
            f"over {self.world_size} ranks on {self.device}" + ", beside others" * self.beside
        )


@dataclass(frozen=True)
class Tile:
    """How one kernel tiles the local GEMM. Sizes are in elements, and powers of two."""

    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    group_m: int = 8
    num_warps: int = 8
    num_stages: int = 3
    tma: bool = False


TRANSPORTS = ("copy_engine", "sm", "exchange", "engines")
MAX_GROUPS = 16  # wave groups of one GEMM
# of a shard in `hopper`: a CTA remembers in 64 bits what 8 ranks have sent (`engines` asks R)
COMM_TILES_MAX = 8
# What a plan of each strategy has beside its name.
FIELDS = {
    "hopper": ("comm_rows", "tile", "k_parts", "transport"),
    "fused": ("comm_rows", "tile"),
    "pipelined": ("comm_rows", "gemms"),
    "low_latency": ("tile", "k_parts", "two_phase"),
    "signalled": ("tile", "group_rows", "bands", "comm_sms"),
    "sequential": (),
}


@dataclass(frozen=True)
class Plan:
    """A strategy and its numbers (`FIELDS`); others are refused.

    `comm_rows` is the communication tile: rows of a shard per transfer and signal, 0 for the whole
    shard. `tile` is that of the kernel. `k_parts`: K is cut into so many, 0 for one; `hopper` cuts
    rows that it gathers, whose communication tiles are parts of all rows of a shard then.
    `transport` names what moves the results of `hopper`: "copy_engine"; "sm", the SMs; or, of
    GEMM+AR, "engines", copy engines for the sums too, which SMs store at every rank otherwise, and
    "exchange": the SMs store all results at every rank, and all ranks add all of them up. `gemms`
    are the library GEMMs of `pipelined`, 0 for one a shard. `two_phase` lets one owner add up each
    tile of GEMM+AR by `low_latency`, instead of every rank.

    `group_rows` are the rows of a shard, in GEMM+AR of y, in each wave group of `signalled`, one
    after another; the rest is one more group. At most so many `bands` of experts have its
    all-to-alls. `comm_sms` SMs are left to its collectives, 0: they run on the group's own
    communicator, and the GEMM takes all SMs.
    """

    strategy: str
    comm_rows: int = 0
    tile: Tile = Tile()
    gemms: int = 0
    k_parts: int = 0
    bands: int = 0
    transport: str = "copy_engine"
    two_phase: bool = False
    group_rows: tuple[int, ...] = ()
    comm_sms: int = 0
    _hash: ClassVar[int]

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise ValueError(f"transport {self.transport!r} given, one of {TRANSPORTS} expected")
        for name, default in _of_others(self.strategy):
            if (value := getattr(self, name)) != default:
                own = ", ".join(FIELDS[self.strategy]) or "no numbers"
                raise ValueError(f"{name} {value} given for {self.strategy}, which has {own}")
        if min(counts := (self.comm_rows, self.gemms, self.k_parts, self.bands)) < 0:
            raise ValueError(f"comm_rows, gemms, k_parts, bands {counts} given, 0 or more expected")
        if len(self.group_rows) >= MAX_GROUPS or min(self.group_rows, default=1) < 1:
            raise ValueError(
                f"group_rows {self.group_rows} given, at most {MAX_GROUPS - 1} sizes above 0 "
                "expected"
            )
        if self.comm_sms < 0:
            raise ValueError(f"comm_sms {self.comm_sms} given, 0 or more expected")
        tile = self.tile
        powers = (tile.block_m, tile.block_n, tile.block_k, tile.num_warps)
        if any(one < 1 or one & (one - 1) for one in powers):
            raise ValueError(f"blocks and num_warps {powers} given, powers of two expected")
        if min(tile.group_m, tile.num_stages) < 1:
            raise ValueError(
                f"group_m {tile.group_m}, num_stages {tile.num_stages} given, 1 or more expected"
            )

        # every call looks its program up by its plan: .1 us in place of .6. Numbers alone, because
        # the hash of a text is another one in a process that this plan is sent to
        numbers = *counts, self.comm_sms, *self.group_rows
        object.__setattr__(self, "_hash", hash((*numbers, *powers, tile.num_stages)))

    def __hash__(self) -> int:
        return self._hash

    @lru_cache(maxsize=1024)  # noqa: B019, a plan is a value
    def dumps(self) -> str:
        """The plan as JSON, for caches and for operators that take only text."""
        own = {name: getattr(self, name) for name in _own(self.strategy)}
        if "tile" in own:
            own["tile"] = vars(self.tile)  # `asdict` copies: 30 us more, at every new M
        return _as_json(own)

    @staticmethod
    def loads(text: str) -> Plan:
        """`TypeError` for a field that there is not."""
        given = json.loads(text)
        tile, group_rows = given.pop("tile", {}), given.pop("group_rows", ())
        return Plan(**given, tile=Tile(**tile), group_rows=tuple(group_rows))


_as_json = json.JSONEncoder(sort_keys=True).encode


@cache
def _own(strategy: str) -> tuple[str, ...]:
    """The fields of its plans. `dispatch` tells of a strategy that there is not."""
    return tuple(dict.fromkeys(("strategy", *FIELDS.get(strategy, _NAMES))))


_NAMES = tuple(one.name for one in fields(Plan))


@cache
def _of_others(strategy: str) -> tuple[tuple[str, Any], ...]:
    """The fields that the strategy has not, each with its default."""
    own = _own(strategy)
    return tuple((one.name, one.default) for one in fields(Plan) if one.name not in own)


def own_fields(plan: dict[str, Any]) -> dict[str, Any]:
    """Of all fields of a plan those that its strategy has."""
    own = ("strategy", *FIELDS.get(plan["strategy"], plan))
    return {name: value for name, value in plan.items() if name in own}


def plan_text(plan: Plan | None) -> str:
    return plan.dumps() if plan else ""


# Dynamo cannot trace the JSON encoder. This line does what `assume_constant_result` of
# torch.compiler does, without importing Dynamo: 2 of the 7 s that a rank's imports take.
plan_text._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=1024)
def plan_of(text: str) -> Plan | None:
    return Plan.loads(text) if text else None

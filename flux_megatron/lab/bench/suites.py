"""What is measured: the tensor-parallel linear layers of models, by pattern. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from flux_megatron import option_values, patterns
from flux_megatron.errors import BadInput
from flux_megatron.patterns import Pattern, PatternSpec
from flux_megatron.tune_command.widths import MODELS, Model

PATTERNS = (*map(str, Pattern), "backward", "backward_ar")
BACKWARDS = ("backward", "backward_ar")
WHOLE_TOKENS = ("gemm_ar", "backward_ar")  # M is not divided over the ranks
# candidates of other libraries, by their names and patterns
PEERS: dict[str, dict[str, tuple[str, ...]]] = {
    "async_tp": dict.fromkeys(("ag_gemm", "gemm_rs", "backward"), ("async_tp",)),
    "te": {"ag_gemm": ("te_ring",), "gemm_rs": ("te_ring", "te_pipeline"), "backward": ("te",)},
    "quack": {"ag_gemm": ("quack",)},
}
COLUMN = ("qkv", "fc1")


@dataclass(frozen=True)
class Case:
    """One operation on one shape.

    `M, N, K` are the global problem of the pattern, as in `problem.Problem`. For `backward`, and
    `backward_ar` without sequence parallelism, N and K are the weight's: `op` qkv and fc1 split N
    over the ranks, proj and fc2 split K.
    """

    suite: str
    pattern: str
    op: str
    M: int
    N: int
    K: int
    layout: str
    world_size: int

    @property
    def spec(self) -> PatternSpec:
        """What is divided over the ranks; for a backward in the layer's forward."""
        if self.pattern in BACKWARDS:
            return (patterns.COLUMN if self.op in COLUMN else patterns.ROW).spec
        return Pattern(self.pattern).spec

    @property
    def N_local(self) -> int:
        return self.N // self.world_size if self.spec.gathers else self.N

    @property
    def K_local(self) -> int:
        return self.K // self.world_size if self.spec.reduces else self.K

    def __str__(self) -> str:
        sizes = f"{self.M} x {self.N_local} x {self.K_local}"
        return f"{self.suite} {self.pattern} {self.op} {sizes} {self.layout}"


def cases(
    suite: str, pattern: str, Ms: tuple[int, ...], world_size: int, scale: int = 1
) -> list[Case]:
    """Every case of a suite's pattern, largest M first. `BadInput` where ranks cannot share."""
    whole = pattern in WHOLE_TOKENS
    if bad := [M for M in Ms if M <= 0 or (M % world_size and not whole)]:
        raise BadInput(f"M {bad} given, multiples of the {world_size} ranks expected")
    layers = _layers(MODELS[suite].scaled(scale), pattern)
    if uneven := [op for op, N, K, _ in layers if N % world_size or K % world_size]:
        raise BadInput(f"{suite}: {uneven} cannot be split over {world_size} ranks")
    return [
        Case(suite, pattern, op, M, N, K, layout, world_size)
        for M in sorted(set(Ms), reverse=True)
        for op, N, K, layout in layers
    ]


def of_shape(text: str, world_size: int) -> Case:
    """A case of no model: "gemm_rs 1536x8192x2048", M x N x K of one rank's GEMM in a forward."""
    pattern, _, sizes = text.strip().partition(" ")
    option_values.names("--shapes", pattern, map(str, Pattern))
    given = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", sizes)
    M, N, K = map(int, given.groups()) if given else (0, 0, 0)
    case = Case("shapes", pattern, f"{N}x{K}", M, N, K, "nt", world_size)
    if not given or (M % world_size and pattern not in WHOLE_TOKENS):
        expected = f"PATTERN MxNxK with M a multiple of the {world_size} ranks expected"
        raise BadInput(f"--shapes {text!r} given, {expected}")
    return replace(
        case,
        N=N * world_size if case.spec.gathers else N,
        K=K * world_size if case.spec.reduces else K,
    )


def _layers(model: Model, pattern: str) -> list[tuple[str, int, int, str]]:
    """(op, N, K, layout) of the global problems; a dual reads the layer's weight as it lies."""
    hidden = model.hidden
    column, row = {"qkv": model.qkv, "fc1": model.fc1}, {"proj": model.attention, "fc2": model.ffn}
    gathered = [(op, N, hidden, "nt") for op, N in column.items()]
    gathered += [(f"{op} dgrad", K, hidden, "nn") for op, K in row.items()]
    scattered = [(op, hidden, K, "nt") for op, K in row.items()]
    dgrads = [(f"{op} dgrad", hidden, N, "nn") for op, N in column.items()]
    backward = [(op, N, hidden, "nn") for op, N in column.items()]  # of row: no communication in AR
    all_of = {
        "ag_gemm": gathered, "gemm_rs": scattered + dgrads, "gemm_ar": scattered,
        "backward": backward + [(op, hidden, K, "nn") for op, K in row.items()],
        "backward_ar": backward,
    }  # fmt: skip
    return all_of[pattern]

"""What is measured: the tensor-parallel linear layers of models, by pattern. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from flux_megatron import option_values, patterns
from flux_megatron.errors import BadInput
from flux_megatron.patterns import Pattern, PatternSpec
from flux_megatron.tune_command.widths import MODELS, Model

PATTERNS = (*map(str, Pattern), "backward", "backward_ar", "gemm")
BACKWARDS = ("backward", "backward_ar")
WHOLE_TOKENS = ("gemm_ar", "backward_ar", "gemm")  # M is not divided over the ranks
_ALONE = PatternSpec()
# candidates of other libraries, by their names and patterns
PEERS: dict[str, dict[str, tuple[str, ...]]] = {
    "async_tp": dict.fromkeys(("ag_gemm", "gemm_rs", "backward"), ("async_tp",)),
    "te": {"ag_gemm": ("te_ring",), "gemm_rs": ("te_ring", "te_pipeline"), "backward": ("te",)},
    "quack": {"ag_gemm": ("quack",)},
}
COLUMN = ("qkv", "fc1")
ROW = ("proj", "fc2")


@dataclass(frozen=True)
class Suite:
    """The layers `ops` of a model; without their backward where not all layers are meant."""

    model: str
    ops: tuple[str, ...] = ()  # all, forward and backward

    def has(self, op: str, pattern: str) -> bool:
        return not self.ops or (op in self.ops and pattern not in BACKWARDS)


SUITES = {name: Suite(name) for name in MODELS} | {
    # the FLUX paper's operator benchmark: (N, K) = (49152, 12288) and (12288, 49152)
    "paper-operators": Suite("gpt3-175b", ("fc1", "fc2")),
    # its inference: M 16384 for prefill (8 x 2048 tokens), 64 and 512 for decoding
    "gpt3-175b-inference": Suite("gpt3-175b", COLUMN + ROW),
    "llama2-70b-inference": Suite("llama2-70b", COLUMN + ROW),
}


@dataclass(frozen=True)
class Case:
    """One operation on one shape.

    `M, N, K` are the global problem of the pattern, as in `problem.Problem`. For `backward`, and
    `backward_ar` without sequence parallelism, N and K are the weight's: `op` qkv and fc1 split N
    over the ranks, proj and fc2 split K. For `gemm` they are those of one rank.
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
        return _ALONE if self.pattern == "gemm" else Pattern(self.pattern).spec

    @property
    def N_local(self) -> int:
        return self.N // self.world_size if self.spec.gathers else self.N

    @property
    def K_local(self) -> int:
        return self.K // self.world_size if self.spec.reduces else self.K

    def __str__(self) -> str:
        return (
            f"{self.suite} {self.pattern} {self.op} {self.M} x {self.N_local} x {self.K_local} "
            f"{self.layout}"
        )


def cases(
    suite: str, pattern: str, Ms: tuple[int, ...], world_size: int, scale: int = 1
) -> list[Case]:
    """Every case of a suite's pattern, largest M first. `BadInput` where ranks cannot share."""
    whole = pattern in WHOLE_TOKENS
    if bad := [M for M in Ms if M <= 0 or (M % world_size and not whole)]:
        raise BadInput(f"M {bad} given, multiples of the {world_size} ranks expected")
    model = MODELS[SUITES[suite].model].scaled(scale)
    layers = _layers(SUITES[suite], model, pattern)
    if uneven := [op for op, N, K, _ in layers if N % world_size or K % world_size]:
        raise BadInput(f"{suite}: {uneven} cannot be split over {world_size} ranks")
    if pattern == "gemm":
        layers = _local_gemms(SUITES[suite], model, world_size)
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


def _layers(suite: Suite, model: Model, pattern: str) -> list[tuple[str, int, int, str]]:
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
        "backward_ar": backward, "gemm": gathered + scattered + dgrads,
    }  # fmt: skip
    return [layer for layer in all_of[pattern] if suite.has(layer[0], pattern)]


def _local_gemms(suite: Suite, model: Model, world_size: int) -> list[tuple[str, int, int, str]]:
    """One rank's GEMMs in both patterns, each size once under its first name."""
    gemms: dict[tuple[int, int, str], str] = {}
    for op, N, K, layout in _layers(suite, model, "ag_gemm"):
        gemms.setdefault((N // world_size, K, layout), op)
    for op, N, K, layout in _layers(suite, model, "gemm_rs"):
        gemms.setdefault((N, K // world_size, layout), op)
    return [(op, N, K, layout) for (N, K, layout), op in gemms.items()]

"""What the rows have to show: H200, bf16, multicast off, TP 4 unless asked for another. No torch.

Every target holds with CUDA_DEVICE_MAX_CONNECTIONS unset and with 1, for both suites, and is asked
of `auto`, what a user gets without choosing anything.
"""

from __future__ import annotations

from dataclasses import dataclass

WORLD_SIZE = 4
GPU = "H200"
DTYPE = "bfloat16"
ROUNDS_MIN = 12
CONNECTIONS = ("unset", "1")
HOST_US_MAX = 25.0
NOISE_MAX = 0.02  # of the baseline: a run that is noisier than this gets no more allowance

# kinds of bounds on `auto` (`ours_gemm` for "gemm_share"); `check` says how each is computed
EFFICIENCY = "E"
TIMES_GEMM = "T / T_gemm"
NEVER_SLOWER = "T / baseline"
GEMM_SHARE = "T_gemm / T"


@dataclass(frozen=True)
class Target:
    """A bound for the cases of a pattern with M_min <= M <= M_max; `beside` others, or alone."""

    pattern: str
    M_min: int
    M_max: int
    kind: str
    bound: float = 1.0
    beside: bool = False

    def __str__(self) -> str:
        rows = (
            f"M = {self.M_min}" if self.M_min == self.M_max else f"M = {self.M_min} .. {self.M_max}"
        )
        what = f"{self.pattern}{' beside' * self.beside}, {rows}"
        if self.kind == NEVER_SLOWER:
            return f"{what}: never slower than {BASELINE[self.pattern]}"
        sign = "<=" if self.kind == TIMES_GEMM else ">="
        return f"{what}: {self.kind} {sign} {self.bound:.2f}"


TARGETS = (
    Target("ag_gemm", 4096, 8192, EFFICIENCY, 0.95),
    Target("ag_gemm", 2048, 2048, EFFICIENCY, 0.90),
    Target("ag_gemm", 1024, 1024, EFFICIENCY, 0.60),
    Target("ag_gemm", 64, 512, NEVER_SLOWER),
    Target("gemm_rs", 4096, 8192, EFFICIENCY, 0.95),
    Target("gemm_rs", 2048, 2048, EFFICIENCY, 0.85),
    Target("gemm_rs", 1024, 1024, EFFICIENCY, 0.60),
    Target("gemm_rs", 64, 512, NEVER_SLOWER),
    Target("gemm_ar", 4096, 8192, EFFICIENCY, 0.90),
    Target("gemm_ar", 64, 8192, NEVER_SLOWER),
    Target("backward", 4096, 8192, TIMES_GEMM, 1.02),
    Target("backward", 2048, 2048, TIMES_GEMM, 1.03),
    Target("backward", 1024, 1024, TIMES_GEMM, 1.06),
    Target("backward", 64, 512, NEVER_SLOWER),
    Target("backward_ar", 64, 8192, NEVER_SLOWER),
    Target("gemm", 512, 8192, GEMM_SHARE, 1.00),
    Target("gemm", 64, 256, GEMM_SHARE, 0.97),
    *(
        target
        for pattern in ("ag_gemm", "gemm_rs", "backward")
        for target in (
            Target(pattern, 4096, 8192, EFFICIENCY, 0.90, beside=True),
            Target(pattern, 2048, 2048, EFFICIENCY, 0.75, beside=True),
            Target(pattern, 64, 8192, NEVER_SLOWER, beside=True),
        )
    ),
    Target("gemm_ar", 64, 8192, NEVER_SLOWER, beside=True),
    Target("backward_ar", 64, 8192, NEVER_SLOWER, beside=True),
)
# the candidate that `auto` is never to be slower than
BASELINE = {
    "ag_gemm": "serial",
    "gemm_rs": "serial",
    "gemm_ar": "serial",
    "backward": "megatron",
    "backward_ar": "megatron",
}
# the candidates that `auto` is to be ahead of on every row
COMPETITORS = {
    "ag_gemm": ("async_tp", "te_ring", "xformers", "quack"),
    "gemm_rs": ("async_tp", "te_ring", "te_pipeline", "xformers"),
    "backward": ("async_tp", "te", "xformers"),
    "gemm_ar": (),
    "backward_ar": (),
    "gemm": (),
}
# of other libraries: they only multiply; where there are rows of them, `ours_gemm` is held against
# the fastest GEMM
GEMM_PEERS = ("quack_gemm",)
WITH_HOST_TIME = ("ag_gemm", "gemm_rs")


def targets_of(pattern: str, M: int) -> list[Target]:
    """The bounds of a case: one alone, then those beside others."""
    return [t for t in TARGETS if t.pattern == pattern and t.M_min <= M <= t.M_max]

"""The options of a traced run. No torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from flux_megatron import machine, option_values, settings
from flux_megatron.errors import BadInput

LAYERS = ("column", "row")
# M, N, K of a column layer: fc1 of GPT-3 175B, and one that an interpreter can run
SIZES = {"cuda": (4096, 49152, 12288), "cpu": (64, 128, 64)}


@dataclass(frozen=True)
class TraceOptions:
    """One layer y[M, N] = x[M, K] w[N, K]^T on `tp` ranks, traced into the folder `out`."""

    out: str
    layer: str
    M: int
    N: int
    K: int
    tp: int = 4
    strategy: str = "auto"
    device: str = "cuda"
    nvls: bool = False

    def __post_init__(self) -> None:
        if self.layer not in LAYERS:
            raise BadInput(f"layer {self.layer!r} given, one of {LAYERS} expected")
        if self.device not in SIZES:
            raise BadInput(f"device {self.device!r} given, one of {(*SIZES,)} expected")
        option_values.names("--strategy", self.strategy, settings.STRATEGIES)
        split = {"M": self.M, "N": self.N} if self.layer == "column" else {"M": self.M, "K": self.K}
        for name, size in split.items():
            if size < 1 or size % self.tp:
                raise BadInput(f"{name} {size} given, a multiple of the {self.tp} ranks expected")
        if self.device == "cpu":
            local = (self.N // self.tp, self.K) if "N" in split else (self.N, self.K // self.tp)
            machine.check_interpreted([(self.M, *local)], "smaller --M, --N, --K or none of them")

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def loads(text: str) -> TraceOptions:
        return TraceOptions(**json.loads(text))


def sizes(layer: str, device: str, M: int | None, N: int | None, K: int | None) -> dict[str, int]:
    """What was given, and defaults for the rest."""
    default_M, wide, narrow = SIZES.get(device, SIZES["cuda"])
    default_N, default_K = (wide, narrow) if layer == "column" else (narrow, wide)
    return {"M": M or default_M, "N": N or default_N, "K": K or default_K}

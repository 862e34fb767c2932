"""What FP8 with one scale a tensor adds to a linear layer, as TransformerEngine does it: largest
values, casts and transposes, all bound by memory.

| layer | forward | backward |
| --- | --- | --- |
| column | x cast, then gathered | dy cast and transposed; x gathered, then transposed |
| row | x cast and transposed | dy cast, gathered, then transposed |
"""

from __future__ import annotations

from flux_megatron.lab.perf.collectives import all_reduce_us
from flux_megatron.lab.perf.gemm import pass_us
from flux_megatron.lab.perf.hardware import Hardware
from flux_megatron.lab.perf.linear import Cost, Linear

READ = 2  # bytes of an element; one more byte is written for a cast, and for a transpose


# Of a recipe the passes over a tensor for its largest value, before the one that casts it, which
# takes the scale of steps before where there are none; and all kernels.
RECIPES = {"tensorwise": (1, 3), "delayed": (0, 1)}


def cost(layer: Linear, name: str, hardware: Hardware, weights: float = 0.0) -> Cost:
    """By a recipe's name. `weights`: how often in a micro-batch the weight is cast. Ranks agree on
    the largest value of what they gather.
    """
    looks, kernels = RECIPES[name]
    sizes = layer.M * layer.K, layer.M * layer.N, layer.N * layer.K
    x, dy, w = (size // layer.tp for size in sizes)

    def cast_us(elements: float, written: int) -> float:
        return pass_us(hardware, elements * (READ * (1 + looks) + written), kernels)

    gathered = layer.tp * (x if layer.column else dy)
    agreed = all_reduce_us(hardware, 4, layer.tp) if looks else 0.0
    forward = cast_us(x, 1 if layer.column else 2) + (cast_us(w * weights, 2) if weights else 0.0)
    backward = cast_us(dy, 2 if layer.column else 1) + pass_us(hardware, 2 * gathered)
    before = (agreed, 0.0) if layer.column else (0.0, agreed)
    return Cost(forward + before[0], backward + before[1], *before)

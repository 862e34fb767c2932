"""The scales of FP8 operands in the epilogues of the Hopper kernels."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flux_megatron.kernels.gluon_versions import Pointer, aggregate


@aggregate
class Scales:
    """Of x and of w, a number each; unused for other dtypes."""

    x: Pointer
    w: Pointer
    SCALED: gl.constexpr

    @gluon.jit
    def load(self):
        """Their product. Load it before the MMAs of a tile, so that nothing waits behind them."""
        scale = 1.0
        if self.SCALED:
            scale = gl.load(self.x) * gl.load(self.w)
        return scale

    @gluon.jit
    def applied(self, out, scale):
        if self.SCALED:
            out = out * scale
        return out

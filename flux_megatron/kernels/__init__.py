"""Triton kernels, one pattern a file; the same source is interpreted on CPU and compiled for GPUs.

Nothing here knows process groups or autograd; `triton_launch`, `interpreter` and `compiled_ahead`
alone know streams and the environment. `interpreter` repairs Triton's interpreter first where that
is in use.
"""

from flux_megatron.kernels import interpreter

interpreter.prepare()

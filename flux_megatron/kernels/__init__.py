"""Triton kernels, one pattern a file; the same source is interpreted on CPU and compiled for GPUs.

Nothing here knows process groups, streams, autograd or the environment. `interpreter` repairs
Triton's interpreter first where that is in use.
"""

from flux_megatron.kernels import interpreter

interpreter.prepare()

"""Triton kernels, one pattern a file; the same source is interpreted on CPU and compiled for GPUs.

Nothing here knows process groups, streams, autograd or the environment. Where Triton interprets,
its interpreter is repaired first (see `interpreter`).
"""

from flux_megatron.kernels import interpreter

interpreter.prepare()

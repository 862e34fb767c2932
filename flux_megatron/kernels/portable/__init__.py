"""Kernels of plain Triton: any GPU, and the interpreter."""

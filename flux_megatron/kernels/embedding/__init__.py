"""Kernels of embedding tables."""

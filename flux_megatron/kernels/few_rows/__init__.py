"""Kernels of few rows: words that carry their flag."""

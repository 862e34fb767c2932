"""Strategies: how a pattern overlaps its communication with its GEMM. `registry` lists them."""

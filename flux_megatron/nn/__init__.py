"""Autograd for tensor-parallel linear layers: torch only. `functions` is the entrance."""

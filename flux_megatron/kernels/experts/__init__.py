"""Kernels of mixtures of experts: rows that travel to experts and back."""

"""Megatron-core's seams: layers, norm, provider and specs.

Only here and in `train` above is megatron imported.
"""

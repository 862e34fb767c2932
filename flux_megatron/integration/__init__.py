"""Megatron-core's seams: layers, norm, provider and specs. Of the product only this room imports
megatron.
"""

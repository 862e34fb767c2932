"""What differs between versions of Python, torch, Triton, megatron-core and TransformerEngine, and
which were run: one file for each.

No other file compares versions. Nothing here is imported from those libraries when it is loaded.
"""

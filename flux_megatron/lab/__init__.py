"""The laboratory: what measures, predicts, plots, rehearses or demonstrates.

The product, all else in `flux_megatron`, imports nothing of it; only the command line starts its
commands, and refuses them where it is not installed. Each room is a folder.
"""

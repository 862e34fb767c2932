"""`flux-megatron simulate`: what an experiment's steps would take, and what of it is exposed.

Here is the command and what it prints; the model is `perf`. Neither torch nor a GPU is needed.
"""

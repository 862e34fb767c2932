"""`flux-megatron trace`: one layer, forward and backward, as a trace file and as a picture."""

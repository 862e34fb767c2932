"""Decoding of a model that `flux-megatron train` has trained: `flux-megatron generate`."""

"""`flux-megatron train`: megatron-core's model, data and optimizer on our layers or stock ones."""

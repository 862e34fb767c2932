"""The pretraining job `flux-megatron train`.

Megatron-core's model, data and optimizer on our layers or on stock ones.
"""

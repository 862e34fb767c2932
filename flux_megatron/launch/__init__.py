"""Experiments: read, checked, launched. `python -m flux_megatron.launch` is one rank of a run."""

# Variables that must stand in the environment before a rank imports torch and triton.
CPU = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}
# One hardware queue: kernels run in the order of their launches, communication first. Megatron
# demands it for tensor parallelism up to Hopper.
ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}

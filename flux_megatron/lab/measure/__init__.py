"""Scripts that measure one thing each: modules for `python -m` and torchrun."""

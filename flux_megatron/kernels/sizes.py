"""Host arithmetic on sizes; Triton's own functions of these names are slow on the host."""


def cdiv(size: int, block: int) -> int:
    """Blocks that cover `size`."""
    return -(-size // block)


def next_power_of_2(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()

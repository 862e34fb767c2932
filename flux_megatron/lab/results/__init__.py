"""What runs have shown: logs of the arms read, timed, compared. Neither torch nor Megatron."""

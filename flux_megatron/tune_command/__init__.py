"""The command `flux-megatron tune`, and how a command starts ranks on this machine."""

"""Symmetric memory: buffers that every rank of a group can read and write, and signals beside them.

Knows groups, devices and bytes; knows no GEMM. `workspace.workspace(group, device)` is the
entrance.
"""

"""Symmetric memory: buffers that every rank of a group can read and write, and signals beside them.

This package knows groups, devices and bytes. It knows no GEMM. Start at
`workspace.workspace(group, device)`.
"""

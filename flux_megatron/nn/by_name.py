"""The linear layers, of a group that is known by its name and its R ranks.

Modules keep these: a module that holds a group cannot be copied, and torch.compile cannot look a
group up.
"""

from __future__ import annotations

from torch import Tensor

from flux_megatron import ops
from flux_megatron.nn import all_reduced, functions, operators


def linear(layer: str, x: Tensor, w: Tensor, bias: Tensor | None, name: str, R: int) -> Tensor:
    """The function of a layer that `functions` names. With the group "" dx of a local layer stays
    this rank's partial sum; row and whole layers have no bias.
    """
    if ops.is_traced():
        return operators.linear(layer, x, w, None, name, R, bias, False)[0]
    if layer == "local":
        group = ops.group_named(name) if name else None
        return all_reduced.local_linear(x, w, bias, allreduce_group=group)
    if layer == "column":
        return functions.column_parallel_linear(x, w, bias, group=ops.group_named(name))
    function = functions.row_parallel_linear if layer == "row" else all_reduced.row_linear
    return function(x, w, group=ops.group_named(name))

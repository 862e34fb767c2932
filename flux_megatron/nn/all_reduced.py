"""Linear layers whose ranks all hold every token: Megatron's without sequence parallelism.

R is the number of ranks; each has a shard of the weight, of N in a column layer, of K in a row one.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from flux_megatron import ops
from flux_megatron.nn.functions import Options, Wgrad, linear
from flux_megatron.patterns import Pattern
from flux_megatron.wgrad import plain_wgrad


def local_linear(
    x: Tensor, w: Tensor, bias: Tensor | None, *, wgrad: Wgrad | None = None,
    allreduce_group: ProcessGroup | None = None, dy_buffer: list[Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """y = x w^T + bias, a column layer: x [..., K], w [N / R, K] -> y [..., N / R].

    With `allreduce_group` backward sums dx over it by GEMM+AR, hidden behind wgrad. `wgrad` and
    `dy_buffer` as in `functions.column_parallel_linear`. Errors are those of `ops.gemm_all_reduce`.
    """
    if allreduce_group is not None:
        x = ops.local("x", x, None, allreduce_group.group_name)
        w = ops.local("w", w, 0, allreduce_group.group_name)
    options = Options("local", allreduce_group, wgrad or plain_wgrad, dy_buffer=dy_buffer)
    return linear("local_linear", x, w, bias, options)


def row_linear(x: Tensor, w: Tensor, *, group: ProcessGroup, wgrad: Wgrad | None = None) -> Tensor:
    """y = AR(x w^T), a row layer: x [..., K / R], w [N, K / R] -> y [..., N].

    y is the same on all ranks. `wgrad` as in `functions.column_parallel_linear`. Errors are those
    of `ops.gemm_all_reduce`.
    """
    ops.name_of(group)  # without a group y would be this rank's share alone
    x, w, _ = ops.local_shards(Pattern.GEMM_AR, x, w, None, group, "nt")
    return linear("row_linear", x, w, None, Options("whole", group, wgrad or plain_wgrad))

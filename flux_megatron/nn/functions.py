"""Linear layers as functions: checks of the operands, then a node of autograd or an operator.

Between `column_parallel_linear` and `row_parallel_linear` a rank has all tokens, elsewhere its
shard of them, as under sequence parallelism. `local_linear` and `row_linear` are for ranks that all
hold every token. R is the number of ranks. Under autocast operands are cast as for
`torch.nn.functional.linear`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.distributed import ProcessGroup

from flux_megatron import ops
from flux_megatron.nn import operators
from flux_megatron.nn.linear_passes import Options, Wgrad, run
from flux_megatron.patterns import COLUMN, ROW, Pattern
from flux_megatron.wgrad import IntoMainGrad, plain_wgrad


def column_parallel_linear(
    x: Tensor, w: Tensor, bias: Tensor | None, *, group: ProcessGroup,
    wgrad: Wgrad | None = None, save_gathered: bool = False,
) -> Tensor:  # fmt: skip
    """y = AG(x) w^T + bias.

    | tensor | shape (R = world size, s = sequence) |
    | --- | --- |
    | x | [s / R, ..., K] |
    | w, bias | [N / R, K], [N / R] |
    | result | [s, ..., N / R] |

    `save_gathered` keeps the gathered x for wgrad: R times the memory of x, one gather less in
    backward. `wgrad(w, dy, x)` returns the weight's gradient, or accumulates it elsewhere and
    returns None; a `wgrad.Deferred` gets no x. Errors are those of `ops.all_gather_gemm`. Under
    torch.compile the call is one operator; `wgrad` is None or `wgrad.IntoMainGrad` then.
    """
    ops.given(group)
    x, w, bias = autocast(*ops.local_shards(COLUMN, x, w, bias, group, "nt"))
    if bias is not None and bias.dtype != x.dtype and bias.dtype.is_floating_point:
        y = column_parallel_linear(
            x, w, None, group=group, wgrad=wgrad, save_gathered=save_gathered
        )
        return y + bias  # as torch promotes them
    options = Options("column", group, wgrad or plain_wgrad, save_gathered)
    return linear("column_parallel_linear", x, w, bias, options)


def row_parallel_linear(
    x: Tensor, w: Tensor, *, group: ProcessGroup, wgrad: Wgrad | None = None
) -> Tensor:
    """y = RS(x w^T).

    | tensor | shape (R = world size, s = sequence, a multiple of R) |
    | --- | --- |
    | x | [s, ..., K / R] |
    | w | [N, K / R] |
    | result | [s / R, ..., N] |

    `wgrad` as in `column_parallel_linear`. Errors are those of `ops.gemm_reduce_scatter`.
    """
    ops.given(group)
    x, w, _ = ops.local_shards(ROW, x, w, None, group, "nt")
    options = Options("row", group, wgrad or plain_wgrad)
    return linear("row_parallel_linear", x, w, None, options)


def local_linear(
    x: Tensor, w: Tensor, bias: Tensor | None, *, wgrad: Wgrad | None = None,
    allreduce_group: ProcessGroup | None = None,
) -> Tensor:  # fmt: skip
    """y = x w^T + bias, a column layer: x [..., K], w [N / R, K] -> y [..., N / R].

    With `allreduce_group` backward sums dx over it by GEMM+AR, hidden behind wgrad. `wgrad` as in
    `column_parallel_linear`. Errors are those of `ops.gemm_all_reduce`.
    """
    if allreduce_group is not None:
        name = ops.name_of(allreduce_group)
        x, w = ops.local("x", x, None, name), ops.local("w", w, 0, name)
    options = Options("local", allreduce_group, wgrad or plain_wgrad)
    return linear("local_linear", x, w, bias, options)


def row_linear(x: Tensor, w: Tensor, *, group: ProcessGroup, wgrad: Wgrad | None = None) -> Tensor:
    """y = AR(x w^T), a row layer: x [..., K / R], w [N, K / R] -> y [..., N].

    y is the same on all ranks. `wgrad` as in `column_parallel_linear`. Errors are those
    of `ops.gemm_all_reduce`.
    """
    ops.given(group)  # without a group y would be this rank's share alone
    x, w, _ = ops.local_shards(Pattern.GEMM_AR, x, w, None, group, "nt")
    return linear("row_linear", x, w, None, Options("whole", group, wgrad or plain_wgrad))


def linear(name: str, x: Tensor, w: Tensor, bias: Tensor | None, options: Options) -> Tensor:
    """The layer that `options` name, called by this name: one operator where it is traced, one node
    of autograd where gradients are enabled.
    """
    x, w, bias = autocast(x, w, bias)
    if ops.is_traced(name) and _traceable(name, options):
        layer, group, wgrad, save_gathered = options
        into = wgrad.main_grad if isinstance(wgrad, IntoMainGrad) else None
        named = ("", 1) if group is None else (ops.name_of(group), group.size())
        return operators.linear(layer, x, w, into, *named, bias, save_gathered)[0]
    if is_dynamo_compiling():  # which goes on behind the break, into frames that it cannot trace
        from flux_megatron.nn import undisturbed

        return undisturbed.run(x, w, bias, options)
    return run(x, w, bias, options)


def autocast(x: Tensor, w: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands in the dtype that autocast gives to a linear layer, where it is enabled; it
    leaves fp64.
    """
    if not torch.is_autocast_enabled(x.device.type) or x.dtype == w.dtype == torch.float64:
        return x, w, bias
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), w.to(dtype), None if bias is None else bias.to(dtype)


def _traceable(name: str, options: Options) -> bool:
    """Whether an operator can do it: it takes tensors, no functions of the caller.

    Otherwise torch.compile breaks the graph here, or says why it cannot.
    """
    if options.wgrad is plain_wgrad or isinstance(options.wgrad, IntoMainGrad):
        return True
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(
            f"{name}: a function as wgrad given, None or flux_megatron.wgrad.IntoMainGrad as wgrad "
            "expected under torch.compile"
        )
    return False

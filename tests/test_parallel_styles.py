"""`FluxColwiseParallel` and `FluxRowwiseParallel` in a plan, exact against PyTorch's own styles."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from closeness import assert_exact
from ranks import DEVICE, on_device_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, parallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import parametrizations

import flux_megatron
from flux_megatron.nn import FluxColwiseParallel, FluxRowwiseParallel

BATCH, TOKENS, WIDTH, HIDDEN = 2, 4, 8, 12
PLAIN = {"FLUX_MEGATRON_STRATEGY": "sequential"}
TORCH, OURS = (ColwiseParallel, RowwiseParallel), (FluxColwiseParallel, FluxRowwiseParallel)


class Mlp(nn.Module):
    """Of small integers, so that every sum is exact."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias)
        self.down = nn.Linear(HIDDEN, WIDTH, bias)
        made = torch.Generator().manual_seed(1)
        for layer in (self.up, self.down):
            for parameter in layer.parameters():
                parameter.data = torch.randint(-2, 3, parameter.shape, generator=made).float()

    def forward(self, x: Any) -> Any:
        return self.down(self.up(x).relu())


def mesh() -> Any:
    return init_device_mesh(DEVICE, (dist.get_world_size(),), mesh_dim_names=("tp",))["tp"]


def tokens(layout: Any) -> Tensor:
    whole = torch.arange(BATCH * TOKENS * WIDTH).view(BATCH, TOKENS, WIDTH) % 5 - 2.0
    if isinstance(layout, Shard):
        whole = whole.chunk(dist.get_world_size(), layout.dim)[dist.get_rank()]
    return whole.to(DEVICE).requires_grad_()


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare(model: nn.Module, layout: Any, plans: Any = None, compiled: bool = False) -> None:
    """Forward and backward by PyTorch's styles and by ours, by default of a layout of tokens."""
    runs = []
    of_layout = [
        {"up": column(input_layouts=layout), "down": row(output_layouts=layout)}
        for column, row in (TORCH, OURS)
    ]
    for number, plan in enumerate(plans or of_layout):
        made = parallelize_module(copy.deepcopy(model).to(DEVICE), mesh(), plan)
        x = tokens(layout)
        torch._dynamo.reset()
        run = (
            torch.compile(made, fullgraph=True, backend="aot_eager")
            if compiled and number
            else made
        )
        y = run(x)
        y = y.to_local() if isinstance(y, DTensor) else y
        y.backward((torch.arange(y.numel(), device=y.device) % 3).view(y.shape).float())
        results = {"y": y, "dx": x.grad}
        results |= {f"up {name}": p.to_local() for name, p in made.up.named_parameters()}
        for name, parameter in made.named_parameters():
            if parameter.grad is not None:
                results[f"d {name}"] = whole(parameter.grad)
        runs.append((results, [p.placements for p in made.up.parameters()]))
    (theirs, placements), (ours, our_placements) = runs
    assert our_placements == placements
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert_exact(ours[name], tensor, f"{name}, {layout}, compiled {compiled}")


@pytest.mark.parametrize("world_size", [1, 2])
@on_device_ranks("world_size", environment=PLAIN)
def test_layers_do_what_pytorch_s_styles_do(rank):
    for bias in (True, False):
        for layout in (Shard(1), Shard(0), Replicate()):
            compare(Mlp(bias), layout)
    patterns = {pattern for pattern, _ in flux_megatron.report().calls}
    assert patterns == {"ag_gemm", "gemm_rs", "gemm_ar"}


@on_device_ranks(2, environment=PLAIN)
def test_layers_compile_to_one_graph(rank):
    compare(Mlp(True), Shard(1), compiled=True)


@on_device_ranks(2, environment=PLAIN)
def test_inputs_may_be_dtensors(rank):
    """Inputs that are DTensors: replicated ones, whose gradient DTensor sums, and sharded ones."""

    def prepared(desired: Any, column: Any, row: Any, layout: Any = None) -> dict[str, Any]:
        return {
            "": parallel.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=desired),
            "up": column(input_layouts=layout),
            "down": row(output_layouts=Shard(1), use_local_output=False),
        }

    theirs = prepared(Replicate(), *TORCH)
    for ours in (prepared(Replicate(), *OURS), prepared(Shard(1), *OURS, Shard(1))):
        compare(Mlp(True), Shard(1), [theirs, ours])
    made = parallelize_module(Mlp(True).to(DEVICE), mesh(), prepared(Shard(0), *OURS, Shard(1)))
    with pytest.raises(ValueError, match=r"placements \(Shard\(dim=0\),\) given, .*dim=1"):
        made(tokens(Shard(1)))


@on_device_ranks(2, environment=PLAIN)
def test_an_output_may_be_gathered(rank):
    """The last layer of a model: the logits of all tokens and words on every rank."""
    styles = (ColwiseParallel, FluxColwiseParallel)
    plan = [{"up": one(input_layouts=Shard(1), output_layouts=Replicate())} for one in styles]
    model = Mlp(True)
    model.down = nn.Identity()
    compare(model, Shard(1), plan)


class OfAFramework(nn.Linear):
    """With methods that a framework looks for, and PyTorch's own forward."""

    def initialise(self) -> str:
        return f"{self.out_features} rows"


@on_device_ranks(2, environment=PLAIN)
def test_subclasses_keep_their_methods(rank):
    model = Mlp(True)
    for layer in (model.up, model.down):
        layer.__class__ = OfAFramework
    compare(model, Shard(1), compiled=True)
    made = copy.deepcopy(parallelize_module(model.up, mesh(), FluxColwiseParallel()))
    assert isinstance(made, OfAFramework)
    assert type(made).__name__ == "OfAFramework"
    assert made.initialise() == f"{HIDDEN} rows"


class OwnForward(nn.Linear):
    def forward(self, x: Any) -> Any:
        return 2 * super().forward(x)


def with_forward(layer: nn.Linear) -> nn.Linear:
    """Changed on the object, as frameworks wrap it."""
    layer.forward = lambda x: x  # type: ignore[method-assign]
    return layer


@on_device_ranks(2)
def test_what_cannot_be_parallelized_is_refused(rank):
    here = mesh()
    column, row = FluxColwiseParallel(), FluxRowwiseParallel()
    for style, module, said in (
        (column, nn.Embedding(4, 4), "Embedding given, torch.nn.Linear expected"),
        (column, OwnForward(4, 4), "OwnForward given, torch.nn.Linear expected, or a subclass"),
        (column, with_forward(nn.Linear(4, 4)), "Linear given, torch.nn.Linear expected, or"),
        (row, parametrizations.orthogonal(nn.Linear(4, 4)), "ParametrizedLinear given"),
        (column, nn.Linear(4, 7), "out_features 7 given, a multiple of the mesh's 2"),
        (row, nn.Linear(7, 4), "in_features 7 given, a multiple of the mesh's 2"),
    ):
        with pytest.raises(ValueError, match=said):
            parallelize_module(module, here, style)
    with pytest.raises(ValueError, match=r"input_layouts R given, Shard\(-1\) expected"):
        FluxRowwiseParallel(input_layouts=Replicate())
    layer = parallelize_module(nn.Linear(4, 4), here, FluxColwiseParallel(input_layouts=Shard(1)))
    with pytest.raises(ValueError, match=r"x \[2, 4\] given, more dimensions expected"):
        layer(torch.ones(2, 4))
    two = init_device_mesh(DEVICE, (1, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match="a mesh of one dimension expected"):
        column._apply(nn.Linear(4, 4), two)

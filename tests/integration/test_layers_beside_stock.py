"""Both layers in every option: outputs, gradients, main_grad; the reference is stock's in fp64."""

from __future__ import annotations

import itertools

import pytest
import side_by_side as sbs
import torch
from ranks import on_cpu_ranks
from side_by_side import Case

import flux_megatron


def freeze(layer) -> None:
    """The bias too: stock forgets the gradient of a bias beside a frozen weight."""
    layer.requires_grad_(False)


def main_grad(dtype: torch.dtype = torch.float32, **tags):
    """Gives the weight what Megatron's DistributedDataParallel gives it."""

    def prepare(layer) -> None:
        if layer.gradient_accumulation_fusion:
            generator = torch.Generator().manual_seed(3)
            start = torch.randn(layer.weight.shape, generator=generator)
            layer.weight.main_grad = start.to(dtype)
            for name, value in tags.items():
                setattr(layer.weight, name, value)

    return prepare


def passed_weight(layer) -> dict:
    """Small integers: the same in every dtype."""
    generator = torch.Generator().manual_seed(5)
    shape = (layer.output_size_per_partition, layer.input_size)
    weight = torch.randint(-2, 3, shape, generator=generator).to(layer.config.params_dtype)
    return {"weight": torch.nn.Parameter(weight)}


FUSION = {"gradient_accumulation_fusion": True}
DDP = {"grad_added_to_main_grad": False}
BOTH = {
    "plain": {},
    "no bias": {"options": {"bias": False}},
    "bias returned": {"options": {"skip_bias_add": True}},
    "stride 2": {"options": {"stride": 2}},
    "frozen weight": {"prepare": freeze},
    "frozen input": {"frozen_input": True},
    "expert": {"options": {"is_expert": True, "skip_bias_add": True}},
    "fusion": {"config": FUSION, "prepare": main_grad()},
    "fusion under DDP": {"config": FUSION, "prepare": main_grad(**DDP)},
    "fusion, tied": {"config": FUSION, "prepare": main_grad(zero_out_wgrad=True, **DDP)},
    "fusion, bf16 main_grad": {"config": FUSION, "prepare": main_grad(torch.bfloat16)},
    "fusion, fp16 main_grad": {"config": FUSION, "prepare": main_grad(torch.float16)},
    "fusion, frozen": {"config": FUSION, "prepare": freeze},
}
COLUMN = {
    "output gathered": {"options": {"gather_output": True}},
    "output gathered at call": {"call": lambda layer: {"runtime_gather_output": True}},
    "output not gathered at call": {
        "options": {"gather_output": True},
        "call": lambda layer: {"runtime_gather_output": False},
    },
    "weight passed": {"options": {"skip_weight_param_allocation": True}, "call": passed_weight},
    "dx not reduced": {"options": {"disable_grad_reduce": True}},
    "gathered x kept": {"prepare": lambda layer: setattr(layer, "save_gathered", True)},
}
ROW = {"whole input": {"options": {"input_is_parallel": False}, "only_sp": False}}
CASES = {
    f"{kind}: {name}": Case(kind, **how)
    for kind, own in (("column", COLUMN), ("row", ROW))
    for name, how in {**BOTH, **own}.items()
}
SETUPS = [
    *itertools.product((2, 4), (True, False), (torch.float32, torch.bfloat16)),
    (1, True, torch.float32),
]


@pytest.mark.parametrize(("world_size", "sp", "dtype"), SETUPS)
@on_cpu_ranks("world_size", limit_s=40)
def test_layers_do_what_stock_does(rank, sp, dtype):
    world_size = torch.distributed.get_world_size()
    sbs.start(world_size)
    sbs.give_stock_a_wgrad_kernel()
    problems = []
    for name, case in CASES.items():
        if case.runs_with(sp):
            flux_megatron.reset_report()
            differences = _compare(case, world_size, sp, dtype)
            problems += [f"rank {rank}, {name}: {d}" for d in differences]
            problems += [f"rank {rank}, {name}: {d}" for d in _not_overlapped(case, sp, world_size)]
    assert not problems


def _not_overlapped(case: Case, sp: bool, world_size: int) -> list[str]:
    """Every call must be; without sequence parallelism a column layer has one if dx is needed."""
    report = flux_megatron.report()
    silent = world_size == 1 or case.options.get("is_expert")
    if not sp and case.kind == "column":
        silent = silent or case.frozen_input or case.options.get("disable_grad_reduce")
    if silent:
        return [str(report)] if report.total else []
    return [] if report.total and report.overlapped == report.total else [str(report)]


def _compare(case: Case, world_size: int, sp: bool, dtype: torch.dtype) -> list[str]:
    config = sbs.settings(world_size, sp, dtype, **case.config)
    theirs, ours = (sbs.build(case, ours, config) for ours in (False, True))
    exact = sbs.build(case, False, sbs.settings(world_size, sp, torch.float64))
    exact.load_state_dict({k: v.double() for k, v in theirs.state_dict().items() if v is not None})
    x, dy = (t.to(dtype).double() for t in sbs.operands(case, sp and world_size > 1))
    reference = sbs.use(case, exact, x, dy)
    stock, flux = (sbs.use(case, layer, x, dy) for layer in (theirs, ours))
    differences = []
    if stock["main_grad"] is not None:  # what autograd is given then is no gradient
        start = sbs.build(case, False, config).weight.main_grad
        reference["main_grad"] = start.double() + reference["dw"]
        differences = _placeholder_differs(
            stock.pop("dw"), flux.pop("dw"), theirs.weight, ours.weight
        )
    return differences + [
        c for name in stock for c in _differs(name, flux[name], stock[name], reference[name])
    ]


def _differs(name: str, flux, stock, reference) -> list[str]:
    if stock is None or flux is None:
        return [] if stock is flux else [f"{name}: {flux} and not {stock}"]
    if (flux.shape, flux.dtype) != (stock.shape, stock.dtype):
        return [f"{name}: {flux.shape} {flux.dtype} and not {stock.shape} {stock.dtype}"]
    got, base = sbs.relative_error(flux, reference), sbs.relative_error(stock, reference)
    bound = 1e-6 if flux.dtype == torch.float32 else 2 * base
    return [] if got <= bound else [f"{name}: error {got:.1e}, stock's is {base:.1e}"]


def _placeholder_differs(stock, flux, their_weight, our_weight) -> list[str]:
    tag = "grad_added_to_main_grad"
    if getattr(stock, "dtype", None) != getattr(flux, "dtype", None) or (
        stock is not None and stock.shape != flux.shape
    ):
        return [f"placeholder {flux} and not {stock}"]
    if getattr(their_weight, tag, None) != getattr(our_weight, tag, None):
        return [f"{tag} is {getattr(our_weight, tag, None)}"]
    if getattr(our_weight, "zero_out_wgrad", False) and flux.any():
        return ["the placeholder of a tied weight is not zero"]
    return []

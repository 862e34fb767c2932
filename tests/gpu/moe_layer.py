"""Megatron's MoE layer on GPUs with its own experts and with ours: verified, then timed.

    PYTHONPATH=path/to/core_v0.16.1:. UB_SKIPMC=1 torchrun --standalone --nproc-per-node 2 \
        tests/gpu/moe_layer.py --out moe_layer.jsonl
    torchrun --standalone --nproc-per-node 2 tests/gpu/moe_layer.py --device cpu  # rehearsal

Arms: `sequential`, the all-to-all dispatcher with one MLP an expert; `grouped`, the same with
TransformerEngine's grouped GEMM, if there is one; `ours`, what `--flux-experts` builds, which reads
weights where they lie; `ours, grouped`, the same with TransformerEngine's parameters; `copied`,
`ours` whose weights lie so that each forward copies them. All have the same weights. Tokens have a
common direction, so that the router's counts are uneven.

Verified: y, dx and all weight gradients of some steps, each with new tokens. The largest errors of
our arms against fp64 are at most twice those of `sequential`, as `assert_as_close_as` of the tests
has it. Only `copied` copies weights. Timed, interleaved, the slowest rank of each round: forward,
and forward and backward, with all that the host waits for; `stack`, the copy alone; and, by
`moe_gradients`, the ways to add weight gradients to fp32 main_grads in reverse.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
from pathlib import Path
from typing import Any

import gpu_run
import torch
from gpu_run import Run
from torch import Tensor

import flux_megatron
from flux_megatron.train.cpu_device import without_compiler
from flux_megatron.tuning.timing import race

LIMIT_S = 88
STEPS = 3
COMMON = 0.5  # of all tokens, where each has a deviation of 1

MODELS = {
    "mixtral": (4096, 14336, 8, 2, 4096),
    "fine": (2048, 2048, 64, 8, 4096),
    "tiny": (32, 48, 8, 2, 24),
}


def operands(run: Run, model: Any, number: int) -> tuple[Tensor, Tensor]:
    """x and dy [tokens, 1, hidden] of one step on this rank."""
    dtype, device = getattr(torch, run.about.dtype), run.device
    common = torch.Generator(device).manual_seed(3)
    own = torch.Generator(device).manual_seed(100 * number + run.group.rank())
    shape = (model.tokens, 1, model.hidden)
    x = torch.randn(shape, generator=own, device=device)
    x += COMMON * torch.randn(model.hidden, generator=common, device=device)
    dy = torch.randn(shape, generator=own, device=device)
    return x.to(dtype).requires_grad_(), dy.to(dtype)


def counts(layer: Any) -> Tensor:
    """How many of this rank's tokens the last forward gave to each expert."""
    return layer.token_dispatcher.routing_map.sum(0)


def verify(run: Run, arms: dict[str, Any], model: Any, number: int) -> dict[str, dict[str, float]]:
    """One step of every arm; the largest errors of each. `AssertionError` if ours is wrong."""
    import moe_arms

    x, dy = operands(run, model, number)
    right = moe_arms.reference(run, arms[moe_arms.STOCK], x, dy)
    errors, routed = {}, {}
    for arm, layer in arms.items():
        y = moe_arms.step(layer, x, dy)
        gradients = {
            name: [one.grad for one in weights]
            for name, weights in moe_arms.parameters(layer).items()
        }
        got = {"y": [y.flatten(0, 1)], "dx": [x.grad.flatten(0, 1)], **gradients}
        found = [
            max(largest(one, other) for one, other in zip(got[name], exact, strict=True))
            for name, exact in right.items()
        ]
        # of all ranks: a rank that raised alone would leave the others in a collective
        everywhere = run.slowest(torch.tensor(found, dtype=torch.float64)).tolist()
        errors[arm] = dict(zip(right, everywhere, strict=True))
        routed[arm] = counts(layer)
    stock = errors[moe_arms.STOCK]
    for arm in {moe_arms.OURS, moe_arms.OURS_GROUPED, moe_arms.COPIED} & {*arms}:
        differ = (routed[arm] != routed[moe_arms.STOCK]).sum()
        assert not run.slowest(differ).item(), f"{arm}: other experts are chosen"
        for name, error in errors[arm].items():
            # not "error > allowed": NaN must fail
            assert error <= 2 * stock[name], (
                f"{arm}, step {number}, {name}: error {error:.3g}, "
                f"at most {2 * stock[name]:.3g} allowed"
            )
    return errors


def copies(layer: Any, x: Tensor) -> int:
    """How often a forward copies weights."""
    flux_megatron.reset_report()
    with torch.no_grad():
        layer(x)
    return sum(flux_megatron.report().copies.values())


def largest(got: Tensor, reference: Tensor) -> float:
    """The largest difference from the fp64 reference; NaN if there is one. On the device."""
    assert got.shape == reference.shape, f"{got.shape} given, {reference.shape} expected"
    return (got.detach().double() - reference).abs().max().item()


def verified(run: Run, arms: dict[str, Any], model: Any) -> None:
    """Some steps; a row has the largest errors of every arm."""
    import moe_arms

    steps = [verify(run, arms, model, number) for number in range(STEPS)]
    x, _ = operands(run, model, 0)
    copied = {arm: copies(layer, x) for arm, layer in arms.items()}
    right = {arm: 2 * (arm == moe_arms.COPIED) for arm in arms}
    assert copied == right, f"copies of weights in a forward: {copied}, {right} expected"
    worst = {
        arm: {name: max(step[arm][name] for step in steps) for name in errors}
        for arm, errors in steps[0].items()
    }
    run.row("moe_layer_errors", model=model.name, steps=STEPS, errors=worst)
    stock = worst["sequential"]
    for arm, errors in worst.items():
        ratios = "  ".join(f"{name} {errors[name] / stock[name]:.2f}" for name in errors)
        run.say(f"{model.name:8} {arm:10} error / that of sequential: {ratios}")


def measure(run: Run, arms: dict[str, Any], model: Any, rounds: int) -> None:
    import moe_arms

    x, dy = operands(run, model, 0)
    ours = moe_arms.parameters(arms[moe_arms.OURS])

    def forward(layer: Any) -> None:
        with torch.no_grad():
            layer(x)

    def stack() -> None:
        for name in moe_arms.LINEARS:
            torch.stack([one.detach() for one in ours[name]])

    parts = {
        "forward": {arm: lambda layer=layer: forward(layer) for arm, layer in arms.items()},
        "training": {
            arm: lambda layer=layer: moe_arms.step(layer, x, dy) for arm, layer in arms.items()
        },
    }
    routed = counts(arms[moe_arms.OURS])
    for part, calls in parts.items():
        if not run.time_left():
            run.say("no time for the others")
            return
        found = race({**calls, "stack": stack}, group=run.group, device=run.device, rounds=rounds)
        run.row(
            "moe_layer", model=model.name, part=part, hidden=model.hidden, ffn=model.ffn,
            experts=model.experts, topk=model.topk, tokens=model.tokens, counts=routed.tolist(),
            calls={" ".join(k): n for k, n in flux_megatron.report().calls.items()},
            times_us=found.times_us, failures=found.failures,
        )  # fmt: skip
        cells = "  ".join(f"{name} {found.median_us(name) / 1e3:.3f}" for name in found.times_us)
        run.say(f"{model.name:8} {part:8} ms  {cells}")
        for name, why in found.failures.items():
            run.say(f"  {name} failed: {why[:300]}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=["mixtral", "fine"])
    parser.add_argument("--plain", action="store_true", help="no fused permutation or activation")
    parser.add_argument("--seconds", type=float, default=65)
    parser.add_argument("--rounds", type=int, default=10)
    given = parser.parse_args()
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    os.environ.setdefault("FLUX_MEGATRON_TIMEOUT_S", "30")
    on_gpu = given.device == "cuda"
    run = gpu_run.start(given.out, given.commit, given.seconds)
    with contextlib.nullcontext() if on_gpu else without_compiler():
        import moe_arms
        import moe_gradients
    moe_arms.start(run)
    for name in given.models if on_gpu else ["tiny"]:
        if not run.time_left():
            run.say(f"no time for {name}")
            break
        model = moe_arms.Model(name, *MODELS[name])
        arms = moe_arms.build(run, model, not given.plain)
        if failure := run.failure(lambda arms=arms, model=model: verified(run, arms, model)):
            run.say(f"{name} wrong: {failure[:2000]}")
            gpu_run.finish(run, 1)
        rounds = given.rounds if on_gpu else 2
        measure(run, arms, model, rounds)
        del arms
        moe_gradients.measure(run, model, rounds)
    gpu_run.finish(run)


if __name__ == "__main__":
    main()

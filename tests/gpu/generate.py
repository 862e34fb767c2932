"""Decoding over tensor-parallel ranks: the same tokens as stock, then milliseconds a token.

    torchrun --nproc-per-node 2 tests/gpu/generate.py --out rows.jsonl --commit COMMIT
    TRITON_INTERPRET=1 torchrun --nproc-per-node 2 tests/gpu/generate.py --device cpu

Layers as wide as GPT-3 13B's, with random weights, in bf16. For each batch, first: our arm decodes
eagerly and by replays of a CUDA graph, which must agree to the bit; so does the stock arm; and the
arms' tokens are compared. Where they first differ the row says by how little, as `flux-megatron
generate --compare` does; logits further apart than a part of their spread are an error. Then both
arms' graphs run in turn, STEPS steps a turn. The slowest rank of a round counts, and the median of
the rounds. Needs megatron-core. Any error ends the run with exit code 1.

Without GPUs the sizes are tiny, nothing is captured, and times mean nothing. After `--limit-s` the
process ends by itself, with exit code 3.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import gpu_run
import torch
import torch.distributed as dist
from gpu_run import Run

import flux_megatron

WIDE = {"num_layers": 4, "hidden": 5120, "heads": 40, "ffn": 20480, "seq_length": 512}
TINY = {"num_layers": 1, "hidden": 32, "heads": 4, "ffn": 64, "seq_length": 64}
BATCHES = (1, 4, 16)
STEPS = 32  # of a turn
PROMPT = 4  # so few that prompts of every batch are read by the same kernels
FARTHEST = 0.2  # of the logits' standard deviation: a missing shard moves them by all of it


class Arms(NamedTuple):
    """The same weights in both, in bf16."""

    flux: object
    stock: object


def start(run: Run) -> None:
    """Megatron's process groups, and its random numbers."""
    from megatron.core import parallel_state, tensor_parallel

    if run.device.type == "cpu":
        from flux_megatron.train.cpu_device import pretend_cuda

        pretend_cuda()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=run.group.size())
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)


def arms(run: Run) -> Arms:
    from flux_megatron.train.config import TrainConfig
    from flux_megatron.train.model import gpt_model, transformer_config

    small = run.device.type == "cpu"
    config = TrainConfig.model_validate({
        "model": (TINY if small else WIDE) | {"tied_embeddings": False},
        "parallel": {"tp": run.group.size(), "sequence_parallel": False},
        "train": {"steps": 1, "micro_batch": 1, "global_batch": 1, "lr": 1.0, "dtype": "bfloat16"},
    })  # fmt: skip
    core_config = replace(transformer_config(config), use_cpu_initialization=small)
    models = [
        gpt_model(config.model_copy(update={"layers": layers}), core_config)
        .to(run.device, torch.bfloat16)
        .eval()
        for layers in Arms._fields
    ]
    models[0].load_state_dict(models[1].state_dict())
    return Arms(*models)


def decoder(run: Run, model: object, batch: int, graph: bool):
    from flux_megatron.generate.decoder import Decoder
    from flux_megatron.generate.sampling import Sampler
    from flux_megatron.train.config import BYTE_VOCAB

    sampler = Sampler(batch, BYTE_VOCAB, 0.0, 0, 1, run.device)
    return Decoder(
        model, sampler, rows=batch, slots=PROMPT + 2 * STEPS, vocab=BYTE_VOCAB,
        device=run.device, graph=graph,
    )  # fmt: skip


def prompts(batch: int) -> list[list[int]]:
    """Random bytes, of lengths that differ."""
    generator = torch.Generator().manual_seed(batch)
    drawn = torch.randint(0, 256, (batch, PROMPT), generator=generator).tolist()
    return [text[: PROMPT - row % PROMPT] for row, text in enumerate(drawn)]


def decoded(run: Run, decoding, batch: int, steps: int):
    """`comparison.Decoded` of a decoder."""
    from flux_megatron.generate.comparison import Decoded

    tokens, logits = [], []
    for number in range(steps):
        if number:
            decoding.step()
        else:
            decoding.prefill(prompts(batch), multiple=run.group.size())
        tokens.append(decoding.token.tolist())
        logits.append(decoding.logits.cpu().clone())
    flux_megatron.synchronize()
    return Decoded([list(row) for row in zip(*tokens, strict=True)], logits, logits)


def verify(run: Run, models: Arms, batch: int, steps: int) -> int:
    """How many checks of this batch failed, over all ranks; a row says what was found."""
    from flux_megatron.generate import comparison

    flux_megatron.reset_report()
    found, wrong = {}, 0
    for name, model in models._asdict().items():
        eager, replayed = (
            decoded(run, decoder(run, model, batch, graph), batch, steps) for graph in (False, True)
        )
        same = all(torch.equal(a, b) for a, b in zip(eager.logits, replayed.logits, strict=True))
        if not same or eager.tokens != replayed.tokens:
            largest = comparison.largest_logit_difference(eager, replayed)
            run.say(f"batch {batch}: {name} replayed is not {name} eager, by {largest:.3e}")
            wrong += 1
        found[name] = replayed
    calls = {f"{p} {s}": n for (p, s), n in flux_megatron.report().calls.items()}
    differences = comparison.differences(found["flux"], found["stock"])
    largest = comparison.largest_logit_difference(found["flux"], found["stock"])
    spread = float(found["stock"].logits[0].std())
    wrong += largest > FARTHEST * spread
    texts = [None] * run.group.size()
    dist.all_gather_object(texts, found["flux"].tokens, group=run.group)
    wrong += any(text != texts[0] for text in texts)
    wrong = int(run.slowest(torch.tensor(wrong)))
    run.row(
        "generate tokens", batch=batch, steps=steps, wrong=wrong, differences=differences,
        largest_logit_difference=largest, logit_spread=spread, calls=calls,
    )  # fmt: skip
    first = min(differences, key=lambda one: one["token"], default=None)
    tokens = f"{len(differences)} of {batch} texts differ, the first: {first}"
    run.say(
        f"batch {batch}: {tokens if first else f'{steps} tokens the same'}; logits at most "
        f"{largest:.2e} apart, their spread {spread:.2f}; {wrong} wrong; {calls}"
    )
    return wrong


def turns(run: Run, decoding, batch: int, steps: int) -> Callable[[], float]:
    """One turn: milliseconds a step on this rank. The prompt is read again before each."""
    on_gpu = run.device.type == "cuda"

    def turn() -> float:
        decoding.prefill(prompts(batch), multiple=run.group.size())
        if not on_gpu:
            started = time.perf_counter()
            for _ in range(steps):
                decoding.step()
            return (time.perf_counter() - started) * 1e3 / steps
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(2_000_000)  # the host is ahead when the ranks meet
        dist.all_reduce(torch.zeros(1, device=run.device), group=run.group)
        first.record()
        for _ in range(steps):
            decoding.step()
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last) / steps

    return turn


def measure(run: Run, models: Arms, batch: int, rounds: int, steps: int) -> None:
    ready = {
        name: turns(run, decoder(run, model, batch, True), batch, steps)
        for name, model in models._asdict().items()
    }
    times: dict[str, list[float]] = {name: [] for name in ready}
    for number in range(rounds + 1):
        for name, turn in ready.items():
            slowest = float(run.slowest(torch.tensor(turn())))
            if number:  # the first round captures and warms up
                times[name].append(slowest)
    flux_megatron.synchronize()
    medians = {name: statistics.median(found) for name, found in times.items()}
    for name, ms in medians.items():
        run.row(
            "generate", batch=batch, arm=name, ms_per_token=ms, tokens_per_s=batch / ms * 1e3,
            speedup=medians["stock"] / ms, rounds=rounds, steps=steps,
            captured=run.device.type == "cuda",
        )  # fmt: skip
        run.say(
            f"batch {batch}: {name:5} {ms:8.3f} ms/token {batch / ms * 1e3:9.0f} tokens/s "
            f"{medians['stock'] / ms:5.2f}x"
        )


def everything(run: Run, batches: tuple[int, ...], rounds: int, steps: int) -> int:
    """The exit code."""
    start(run)
    models = arms(run)
    for batch in batches:
        if verify(run, models, batch, steps):
            return 1
        if run.time_left():
            measure(run, models, batch, rounds, steps)
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--limit-s", type=float, default=95)
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        parser.error("no GPU is seen: --device cpu rehearses")
    watchdog = threading.Timer(options.limit_s, os._exit, (3,))
    watchdog.daemon = True
    watchdog.start()
    run = gpu_run.start(options.out, options.commit, options.limit_s - 25)
    steps, rounds = (STEPS, options.rounds) if on_gpu else (4, 2)
    gpu_run.finish(run, everything(run, BATCHES if on_gpu else BATCHES[:2], rounds, steps))


if __name__ == "__main__":
    main()

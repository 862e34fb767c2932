"""What a rank does: for each arm it builds the model, reads the weights, and decodes."""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from flux_megatron.lab.generate.commands import Request
from flux_megatron.lab.generate.decoder import Decoder
from flux_megatron.lab.train.checkpoint import load_weights
from flux_megatron.lab.train.config import TrainConfig
from flux_megatron.lab.train.model import gpt_model, transformer_config
from flux_megatron.lab.train.run_folder import counts_of_all_ranks
from flux_megatron.lab.train.text import ByteTokenizer
from flux_megatron.overlap.report import reset_report
from flux_megatron.symm.step import synchronize


def decode(config: TrainConfig, request: Request, device: torch.device) -> dict[str, Any]:
    """All arms of `request`, and how the second differs from the first. Collective."""
    arms, logits = {}, []
    for name in request.arms:
        arm_config = config.model_copy(update={"layers": name})
        arms[name], of_arm = decode_arm(arm_config, request, device)
        logits.append(of_arm)
    result: dict[str, Any] = {"arms": arms}
    if len(arms) == 2:
        tokens = [arm["tokens"] for arm in arms.values()]
        result["differences"], result["largest_logit_difference"] = differences(*tokens, *logits)
    return result


def decode_arm(
    config: TrainConfig, request: Request, device: torch.device
) -> tuple[dict[str, Any], list[Tensor]]:
    """One arm: its part of the result, and the logits [rows, vocab] of each step. Collective."""
    tokenizer, tp = ByteTokenizer(), config.parallel.tp
    prompts = [tokenizer.tokenize(prompt) or [tokenizer.eod] for prompt in request.prompts]
    rows, vocab = len(prompts), tokenizer.vocab_size
    core_config = replace(transformer_config(config), perform_initialization=False)
    model = gpt_model(config, core_config).to(device, getattr(torch, config.train.dtype))
    load_weights(request.checkpoint, model)
    decoder = Decoder(
        model, rows=rows, vocab=vocab, slots=max(map(len, prompts)) + tp + request.tokens,
        device=device,
    )  # fmt: skip
    reset_report()
    tokens: list[list[int]] = [[] for _ in prompts]
    seconds: list[float] = []
    unfinished, logits = {*range(rows)}, []
    while len(seconds) < request.tokens and unfinished:
        started = time.monotonic()
        decoder.step() if seconds else decoder.prefill(prompts, multiple=tp)
        synchronize()  # a step in which a wait came to its bound shows nothing
        newest = decoder.token.tolist()
        seconds.append(time.monotonic() - started)
        logits.append(decoder.logits.cpu().clone())
        for row in unfinished:
            tokens[row].append(newest[row])
        unfinished = {row for row in unfinished if newest[row] != tokenizer.eod}
    step_s = median(seconds[1:] or seconds)
    return {
        "tokens": tokens,
        "texts": [tokenizer.detokenize(one) for one in tokens],
        "prefill_s": seconds[0],
        "ms_per_step": step_s * 1e3,
        "tokens_per_s": rows / step_s,
        **counts_of_all_ranks(config, 2 * config.model.num_layers * decoder.forwards),
    }, logits


def differences(
    ours: list[list[int]], stock: list[list[int]], our_logits: list[Tensor], its: list[Tensor]
) -> tuple[list[dict[str, int]], float]:
    """The first other token of each prompt that has one, and the largest difference of logits up to
    there. Where that is small, rounding has decided a tie.
    """
    found, largest = [], 0.0
    for row, (a, b) in enumerate(zip(ours, stock, strict=True)):
        for step, (mine, theirs) in enumerate(zip(our_logits, its, strict=False)):
            largest = max(largest, float((mine[row] - theirs[row]).abs().max()))
            if step >= min(len(a), len(b)) or a[step] != b[step]:
                break
        if a != b:
            found.append({"prompt": row + 1, "token": step + 1, "flux": a[step], "stock": b[step]})
    return found, largest

"""What a rank does: for each arm it builds the model, reads the weights, and decodes."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from rich.console import Console

from flux_megatron.lab.generate import comparison
from flux_megatron.lab.generate.comparison import Decoded
from flux_megatron.lab.generate.decoder import Decoder
from flux_megatron.lab.generate.request import REQUEST, Request
from flux_megatron.lab.generate.sampling import Sampler
from flux_megatron.lab.generate.text_stream import TextStream
from flux_megatron.lab.train import run_folder
from flux_megatron.lab.train.checkpoint import load_weights
from flux_megatron.lab.train.config import TrainConfig
from flux_megatron.lab.train.model import gpt_model, transformer_config
from flux_megatron.lab.train.rank_counts import counts_of_all_ranks
from flux_megatron.lab.train.tokenizer import ByteTokenizer
from flux_megatron.overlap.report import reset_report
from flux_megatron.symm.step import synchronize

RESULT = "result.json"


def run(config: TrainConfig, out: Path, console: Console | None, device: torch.device) -> bool:
    """Decode the request in `out`; rank 0 shows the text and leaves the result there."""
    request = Request.model_validate_json((out / REQUEST).read_text())
    decoded: dict[str, Decoded] = {}
    result: dict[str, Any] = {"arms": {}}
    for arm in request.arms:
        arm_config = config.model_copy(update={"layers": arm})
        shown = console if arm == request.arms[0] else None
        decoded[arm], result["arms"][arm] = decode(arm_config, request, shown, device)
    if request.compares:
        ours, stock = decoded["flux"], decoded["stock"]
        result["differences"] = comparison.differences(ours, stock)
        result["largest_logit_difference"] = comparison.largest_logit_difference(ours, stock)
    if console is not None:
        run_folder.write_json(out / RESULT, result)
    return True


def decode(
    config: TrainConfig, request: Request, console: Console | None, device: torch.device
) -> tuple[Decoded, dict[str, Any]]:
    """One arm: what it decoded, and its part of the result. Collective."""
    tokenizer, tp = ByteTokenizer(), config.parallel.tp
    prompts = [tokenizer.tokenize(prompt) or [tokenizer.eod] for prompt in request.prompts]
    rows, vocab = len(prompts), tokenizer.vocab_size
    sampler = Sampler(rows, vocab, request.temperature, request.top_k, request.seed, device)
    decoder = Decoder(
        _model(config, device), sampler, rows=rows, vocab=vocab, device=device,
        slots=max(map(len, prompts)) + tp + request.tokens, graph=request.graph,
    )  # fmt: skip
    load_weights(request.checkpoint, decoder.model)
    reset_report()
    stream = TextStream(request.prompts, console.file) if console else None
    decoded = Decoded([[] for _ in prompts], [], [])
    ended: set[int] = set()
    seconds: list[float] = []
    while len(seconds) < request.tokens and len(ended) < rows:
        started = time.monotonic()
        decoder.step() if seconds else decoder.prefill(prompts, multiple=tp)
        synchronize()  # a step in which a wait came to its bound shows nothing
        tokens = decoder.token.tolist()
        seconds.append(time.monotonic() - started)
        if request.compares:
            decoded.logits.append(decoder.logits.cpu().clone())
            decoded.scores.append(decoder.scores.cpu().clone())
        for row in {*range(rows)} - ended:
            _take(row, tokens[row], decoded.tokens[row], tokenizer.eod, ended, stream)
    for row in sorted({*range(rows)} - ended):
        if stream:
            stream.end(row)
    eligible = 2 * config.model.num_layers * decoder.forwards * dist.get_world_size()
    return decoded, _summary(config, decoded, seconds, eligible)


def _take(
    row: int, token: int, tokens: list[int], eod: int, ended: set[int], stream: TextStream | None
) -> None:
    """A prompt's next token, which may be its last."""
    tokens.append(token)
    if token == eod:
        ended.add(row)
    if stream:
        stream.end(row) if token == eod else stream.add(row, token)


def _model(config: TrainConfig, device: torch.device) -> GPTModel:
    """With weights of any value: they are read afterwards."""
    core_config = replace(transformer_config(config), perform_initialization=False)
    return gpt_model(config, core_config).to(device, getattr(torch, config.train.dtype))


def _summary(
    config: TrainConfig, decoded: Decoded, seconds: list[float], eligible: int
) -> dict[str, Any]:
    counts = counts_of_all_ranks()
    if config.layers == "stock" or config.parallel.tp == 1:
        eligible = 0
    step_s = median(seconds[1:] or seconds)
    tokenizer = ByteTokenizer()
    return {
        "tokens": decoded.tokens,
        "texts": [tokenizer.detokenize(tokens) for tokens in decoded.tokens],
        "prefill_s": seconds[0],
        "ms_per_step": step_s * 1e3,
        "tokens_per_s": len(decoded.tokens) / step_s,
        "eligible": eligible,
        "silent": config.silent_calls(eligible, counts),
        **counts,
    }

"""Hugging Face's own tensor parallelism, `from_pretrained(tp_plan="auto")`: stock, ours, in turns.

    torchrun --nproc-per-node=2 -m flux_megatron.lab.measure.hugging_face rows.jsonl
    TRITON_INTERPRET=1 torchrun --nproc-per-node=2 \\
        -m flux_megatron.lab.measure.hugging_face rows.jsonl --device cpu

A random model is saved once and loaded by every arm. A step is forward, loss, backward and SGD;
then the model generates some tokens. A row an arm: losses and how far they are from those of the
first, relative; seconds of all steps; calls, of training and of decoding; whether the tokens are
the same. Exits 1 where losses are further apart than `BOUND` or ours overlapped no call.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typer

from flux_megatron.lab.measure import gpu_run
from flux_megatron.lab.measure.bridge import WIDTHS
from flux_megatron.lab.measure.gpu_run import Run
from flux_megatron.nn import in_transformers
from flux_megatron.overlap.report import report, reset_report

ARMS = "stock,ours,stock again,ours again"
BOUND = {"cpu": 1e-5, "cuda": 2e-2}
DECODED = 16
STYLES = ("colwise", "rowwise")


def save_model(run: Run, folder: Path, family: str, about: Mapping[str, Any]) -> None:
    import transformers

    config = getattr(transformers, f"{family}Config")(
        **WIDTHS[about["widths"]], num_hidden_layers=about["layers"], tie_word_embeddings=False,
        max_position_embeddings=max(about["tokens"], 64),
    )  # fmt: skip
    if run.group.rank() == 0:
        torch.manual_seed(1)
        with run.device:
            model = getattr(transformers, f"{family}ForCausalLM")(config)
        model.to(getattr(torch, run.about.dtype)).save_pretrained(folder)
    dist.barrier()


def run_arm(run: Run, arm: str, folder: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """What the arm's model did, in `about["steps"]` steps and then."""
    from transformers import AutoModelForCausalLM

    if arm.startswith("ours"):
        in_transformers()
    reset_report()
    dtype = getattr(torch, run.about.dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=dtype)
    model.to(run.device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, foreach=False)
    made = torch.Generator().manual_seed(1)
    losses, seconds = [], []
    for _ in range(about["steps"]):
        shape = about["samples"], about["tokens"]
        ids = torch.randint(WIDTHS["tiny"]["vocab_size"], shape, generator=made).to(run.device)
        begun = _now(run)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(round(_now(run) - begun, 4))
    trained = report()
    model.eval()
    begun = _now(run)
    with torch.no_grad():
        tokens = model.generate(
            ids[:1, :8], attention_mask=torch.ones_like(ids[:1, :8]), max_new_tokens=DECODED,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip
    decode_s = round(_now(run) - begun, 3)
    all_calls = report()
    return {
        "losses": losses, "seconds": seconds, "median_s": statistics.median(seconds[2:] or seconds),
        "calls": trained.total, "overlapped": trained.overlapped,
        "calls_decode": all_calls.total - trained.total,
        "overlapped_decode": all_calls.overlapped - trained.overlapped, "decode_s": decode_s,
        "fallbacks": {f"{pattern}: {why}": n for (pattern, why), n in all_calls.fallbacks.items()},
        "generated": tokens[0].tolist(),
    }  # fmt: skip


def _now(run: Run) -> float:
    """When all ranks have come here, and their GPUs are done."""
    if run.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    return time.perf_counter()


def main(
    out: Path, commit: str = "", device: str = "cuda", family: str = "Qwen3", widths: str = "",
    layers: int = 0, samples: int = 1, tokens: int = 0, steps: int = 0, arms: str = ARMS,
    seconds: float = 240,
) -> None:  # fmt: skip
    """Be one of the ranks. `family` is Qwen3 or Llama, `widths` are of `bridge.WIDTHS`."""
    run = gpu_run.start_on(device, out, commit, seconds)
    from transformers.distributed import tensor_parallel as theirs

    stock = {style: theirs.ALL_PARALLEL_STYLES[style] for style in STYLES}
    small = device == "cpu"
    about = {
        "family": family, "widths": widths or ("tiny" if small else "8b"), "samples": samples,
        "layers": layers or (2 if small else 4), "tokens": tokens or (16 if small else 4096),
        "steps": steps or (3 if small else 12), "transformers": version("transformers"),
    }  # fmt: skip
    folders = [tempfile.mkdtemp() if run.group.rank() == 0 else None]
    dist.broadcast_object_list(folders)
    folder = Path(str(folders[0]))
    save_model(run, folder, family, about)
    first: dict[str, Any] = {}
    names = arms.split(",")

    def measure(arm: str) -> bool:
        for style in STYLES:
            theirs.ALL_PARALLEL_STYLES.register(style, stock[style])
        seen = run_arm(run, arm, folder, about)
        first.update({} if first else seen)
        pairs = zip(seen["losses"], first["losses"], strict=True)
        apart = max(abs(a - b) / b for a, b in pairs)
        same = seen["generated"] == first["generated"]
        run.row("transformers", arm=arm, **about, **seen, apart=apart, same_tokens=same)
        run.say(
            f"{arm:12} {apart:.1e} apart, {seen['median_s'] * 1e3:.1f} ms a step, "
            f"{seen['overlapped']} of {seen['calls']} calls overlapped, decoding "
            f"{seen['overlapped_decode']} of {seen['calls_decode']}, same tokens: {same}"
        )
        if arm == names[-1] and run.group.rank() == 0:
            shutil.rmtree(folder)
        return apart <= BOUND[device] and (seen["overlapped"] > 0) == arm.startswith("ours")

    gpu_run.measure_each(run, names, measure)


if __name__ == "__main__":
    typer.run(main)

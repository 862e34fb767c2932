"""Megatron-Bridge's own `pretrain` and `finetune`, of its Qwen3 recipes: stock and ours in turns.

    python -m flux_megatron.lab.measure.bridge rows.jsonl --tp 2
    TRITON_INTERPRET=1 python -m flux_megatron.lab.measure.bridge rows.jsonl --device cpu

A model is made on the spot, with random weights in Hugging Face's format, and stands for the one
that the recipes download: widths of Qwen3-8B or another size, and `--layers` layers. Tokens are
Megatron's mock data. Cases: `pretrain` from initial values, `sft` and `lora` from the model's
weights. Arms are processes of their own: stock; `variable`, FLUX_MEGATRON_ENABLE=1; `replace`, in
a pre-wrap hook of the provider; and stock once more, whose losses say what a second run changes.
On GPUs the layers are TransformerEngine's, `--fp8` with the recipe `tensorwise`, in which the first
and last layer stay in bf16; on the CPU they are the local ones, in fp32. Ranks may share a GPU
(`gpu_run.share_gpus`): a row's `gpus` says so, and its times mean nothing then.

A row an arm: losses, gradient norms, milliseconds a step, calls, fallbacks with their reasons, and
how far its losses are from stock's. Exits 1 if an arm failed, is further apart than `BOUND`, or
overlapped no call.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import typer

from flux_megatron.lab.bench.provenance import WITHOUT_MULTICAST
from flux_megatron.lab.bench.table_run import append
from flux_megatron.lab.measure import gpu_run
from flux_megatron.versions.library import version_of

CASES = "pretrain,sft,lora"
ARMS = "stock,variable,replace,stock again"
OURS = ("variable", "replace")
BOUND = {"cpu": 1e-5, "cuda": 2e-2}  # of a loss, relative
WIDTHS: Mapping[str, Mapping[str, int]] = {
    "8b": {
        "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    },
    "1.7b": {  # with a vocabulary that is written in seconds
        "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32768,
    },
    "tiny": {
        "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 128,
    },
}  # fmt: skip
OF_DEVICE = {"cuda": "8b", "cpu": "tiny"}
TOKENS = {"cuda": 4096, "cpu": 16}  # of a sequence
PACKAGES = ("megatron-bridge", "megatron-core", "transformer-engine", "torch")


def make_model(folder: Path, device: str, layers: int, widths: str) -> None:
    """A random Qwen3 in Hugging Face's format."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    config = Qwen3Config(**WIDTHS[widths], num_hidden_layers=layers, tie_word_embeddings=False)
    model = Qwen3ForCausalLM(config)
    model.to(torch.float32 if device == "cpu" else torch.bfloat16).save_pretrained(folder)


def recipe(case: str, arm: str, folder: Path, about: Mapping[str, Any]) -> Any:
    """Megatron-Bridge's configuration of this case, in small."""
    from megatron.bridge import AutoBridge
    from megatron.bridge.recipes.qwen import qwen3
    from megatron.bridge.recipes.utils.dataset_utils import build_dataset_config
    from megatron.bridge.training.comm_overlap import CommOverlapConfig

    kind = {"pretrain": "pretrain", "sft": "sft", "lora": "peft"}[case]
    download = AutoBridge.from_hf_pretrained
    AutoBridge.from_hf_pretrained = lambda *_, **__: download(str(folder))
    config = getattr(qwen3, f"qwen3_8b_{kind}_config")()
    device, steps = about["device"], about["steps"]
    model, train = config.model, config.train
    model.tensor_model_parallel_size, model.sequence_parallel = about["tp"], about["sp"]
    model.seq_length = TOKENS[device]
    config.dataset = build_dataset_config(config, "mock")
    config.dataset.num_workers = 0
    config.tokenizer.tokenizer_type, config.tokenizer.tokenizer_model = "NullTokenizer", None
    config.tokenizer.vocab_size = model.vocab_size
    train.train_iters, train.micro_batch_size, train.global_batch_size = steps, 1, 2
    config.validation.eval_iters, config.scheduler.lr_warmup_iters = 0, 0
    config.logger.log_interval, config.logger.tensorboard_dir = 1, None
    config.checkpoint.save = config.checkpoint.load = None
    if case != "pretrain":
        config.checkpoint.pretrained_checkpoint = str(folder)
    if arm == "userbuffers":
        config.comm_overlap = CommOverlapConfig(tp_comm_overlap=True)
    if about["fp8"]:
        config.mixed_precision = "bf16_with_fp8_current_scaling_mixed"
    if device == "cpu":
        _in_small(config)
    return config


def provider_in_small(model: Any) -> None:
    """A provider of local layers, without what needs a GPU."""
    from megatron.bridge.models.gpt_provider import local_layer_spec

    model.transformer_impl, model.transformer_layer_spec = "local", local_layer_spec
    model.cross_entropy_loss_fusion = model.gradient_accumulation_fusion = False
    model.masked_softmax_fusion = model.apply_rope_fusion = model.bias_dropout_fusion = False
    model.persist_layer_norm, model.use_cpu_initialization = False, True


def _in_small(config: Any) -> None:
    """What needs a GPU is left out."""
    from megatron.bridge.training.mixed_precision import MixedPrecisionConfig

    provider_in_small(config.model)
    config.optimizer.use_precision_aware_optimizer = False
    config.mixed_precision = MixedPrecisionConfig(
        fp32=True, params_dtype=torch.float32, pipeline_dtype=torch.float32
    )
    config.ddp.overlap_grad_reduce = config.ddp.overlap_param_gather = False
    config.dist.distributed_backend = "gloo"


def rank(case: str, arm: str, folder: Path, about: Mapping[str, Any]) -> None:
    """One rank of one arm; rank 0 writes what it has seen into the folder."""
    from flux_megatron.overlap.report import report

    if about["device"] == "cpu":
        from flux_megatron.lab.cpu import pretend_gpu

        pretend_gpu()
    else:
        gpu_run.share_gpus()
    from megatron.bridge.training import initialize
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.finetune import finetune
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    from flux_megatron.integration import apex_shim, replacing

    apex_shim.provide_wgrad_kernels()  # the recipes fuse gradients, and stock's output layer asks
    initialize.compile_helpers = lambda: None  # megatron-core's wheel has them, and no Makefile
    seen: dict[str, list[float]] = {"losses": [], "norms": [], "ms": []}

    class Watch(Callback):
        def on_train_step_start(self, context: Any) -> None:
            self.begun = time.perf_counter()

        def on_train_step_end(self, context: Any) -> None:
            seen["losses"].append(float(context.loss_dict["lm loss"]))  # which waits for the GPU
            seen["ms"].append(round(1e3 * (time.perf_counter() - self.begun), 3))
            seen["norms"].append(float(context.grad_norm))

    def overlap(chunks: Any) -> Any:
        replacing.replace(chunks)
        return chunks

    config = recipe(case, arm, folder / "model", about)
    if arm == "replace":
        config.model.register_pre_wrap_hook(overlap)
    (pretrain if case == "pretrain" else finetune)(config, forward_step, callbacks=[Watch()])
    if os.environ["RANK"] == "0":
        calls = report()
        fallbacks = {f"{pattern}: {why}": n for (pattern, why), n in calls.fallbacks.items()}
        counts = {"calls": calls.total, "overlapped": calls.overlapped, "fallbacks": fallbacks}
        counts["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        (folder / "seen.json").write_text(json.dumps({**seen, **counts}))


def run(case: str, arm: str, folder: Path, about: Mapping[str, Any], limit_s: float) -> dict | None:
    """What rank 0 of an arm has seen; None if it failed."""
    (seen := folder / "seen.json").unlink(missing_ok=True)
    arguments = ["rank", case, arm, str(folder), json.dumps(about)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               "--nproc-per-node", str(about["ranks"]), __file__, *arguments]  # fmt: skip
    environment = {**os.environ, **WITHOUT_MULTICAST, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if about["device"] == "cpu":  # nothing is compiled for a GPU that is not there
        environment |= {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
    if arm == "variable":
        environment["FLUX_MEGATRON_ENABLE"] = "1"
    with subprocess.Popen(command, env=environment, cwd=folder) as process:
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # which ends its ranks too
            status = None
    if status == 0 and seen.exists():
        return json.loads(seen.read_text())
    print(f"{case} {arm}: FAILED, status {status}", file=sys.stderr, flush=True)
    return None


def rows(
    case: str, arms: str, folder: Path, about: Mapping[str, Any], limit_s: float
) -> Iterator[dict]:
    """A row an arm that ended well, with how far it is from the first."""
    stock: list[float] = []
    for arm in arms.split(","):
        if (seen := run(case, arm, folder, about, limit_s)) is None:
            continue
        stock = stock or seen["losses"]
        apart = [abs(a - b) / abs(a) for a, b in zip(stock, seen["losses"], strict=True)]
        same = [one <= BOUND[about["device"]] for one in apart]  # no number is not
        row = {"table": "bridge", "case": case, "arm": arm, "apart": max(apart), **seen, **about}
        row["good"] = sum(same) == about["steps"] and (arm not in OURS or seen["overlapped"] > 0)
        middle = statistics.median(seen["ms"][1:] or seen["ms"])
        print(f"{case:9} {arm:12} losses {seen['losses']} {max(apart):.1e} apart, {middle:.1f} ms, "
              f"{seen['overlapped']} of {seen['calls']} calls overlapped", flush=True)  # fmt: skip
        yield row


def main(
    out: Path, device: str = "cuda", tp: int = 2, ranks: int = 0, layers: int = 0, steps: int = 0,
    widths: str = "", cases: str = CASES, arms: str = ARMS, sp: bool = True, fp8: bool = False,
    commit: str = "unknown", limit_s: float = 600,
) -> None:  # fmt: skip
    """Run the cases; `ranks` more than `tp` are data-parallel; `widths` are of WIDTHS."""
    small = device == "cpu"
    about: dict[str, Any] = {
        "device": device, "tp": tp, "ranks": ranks or tp, "sp": sp, "fp8": fp8,
        "widths": widths or OF_DEVICE[device], "gpus": 0 if small else torch.cuda.device_count(),
        "layers": layers or (2 if small else 4), "steps": steps or (4 if small else 20),
        "commit": commit, **{name: version_of(name) for name in PACKAGES},
    }  # fmt: skip
    good = True
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder) / "model", device, about["layers"], about["widths"])
        for case in cases.split(","):
            right = 0
            for row in rows(case, arms, Path(folder), about, limit_s):
                append(out, [row])
                right += row["good"]
            good = good and right == len(arms.split(","))
    raise typer.Exit(0 if good else 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(sys.argv[2], sys.argv[3], Path(sys.argv[4]), json.loads(sys.argv[5]))
    else:
        typer.run(main)

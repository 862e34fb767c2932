"""slime's own `train.py`: an actor, the reference in it, that sleeps between steps and makes its
process groups anew. Rollouts are read from files, by an option of slime's. Without a critic: slime
does not load a critic's head from Hugging Face's format.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

GIVEN = ("log_probs", "ref_log_probs", "values")
# its Megatron-LM is a commit between releases, which gives attributes to weights left uninitialised
ALLOW = "ColumnParallelLinear.__init__,RowParallelLinear.__init__"
STEP = "perf/train_time"  # seconds of a step: log-probabilities, reference, training


def rollouts(folder: Path, about: Mapping[str, Any]) -> None:
    """Samples of random lengths, as slime's engines give them."""
    from slime.utils.types import Sample

    size = about["size"]
    for step in range(about["steps"]):
        made = torch.Generator().manual_seed(step)

        def draw(least: int, most: int, made: torch.Generator = made, n: int = 1) -> list[int]:
            return torch.randint(least, most + 1, (n,), generator=made).tolist()

        samples = []
        for index in range(size["sequences"]):
            (prompt,), (response,) = draw(1, size["prompt"]), draw(1, size["response"])
            samples.append(Sample(
                group_index=index // 2, index=index, response_length=response,
                tokens=draw(3, size["vocabulary"] - 1, n=prompt + response),
                reward=float(draw(0, 1)[0]), status=Sample.Status.COMPLETED,
            ).to_dict())  # fmt: skip
        torch.save({"samples": samples}, folder / f"rollout_{step}.pt")


def arguments(folder: Path, about: Mapping[str, Any]) -> list[str]:
    size, model = about["size"], json.loads((folder / "model" / "config.json").read_text())
    small = about["device"] == "cpu"
    words = {
        "num-layers": model["num_hidden_layers"], "hidden-size": model["hidden_size"],
        "ffn-hidden-size": model["intermediate_size"], "kv-channels": model["head_dim"],
        "num-attention-heads": model["num_attention_heads"],
        "num-query-groups": model["num_key_value_heads"], "vocab-size": model["vocab_size"],
        "normalization": "RMSNorm", "norm-epsilon": model["rms_norm_eps"],
        "rotary-base": int(model["rope_parameters"]["rope_theta"]),
        "make-vocab-size-divisible-by": 1, "seed": 1,
        "hf-checkpoint": folder / "model", "load": folder / "model", "ref-load": folder / "model",
        "save": folder / "saved", "save-hf": str(folder / "sent_{rollout_id}"),
        "save-interval": about["steps"], "tensor-model-parallel-size": about["tp"],
        "actor-num-nodes": 1, "actor-num-gpus-per-node": about["ranks"],
        "num-gpus-per-node": about["ranks"], "num-rollout": about["steps"],
        "rollout-batch-size": size["sequences"] // 2, "n-samples-per-prompt": 2,
        "num-steps-per-rollout": 2, "max-tokens-per-gpu": size["tokens"],
        "data-pad-size-multiplier": 2 if small else 128, "advantage-estimator": "grpo",
        "kl-loss-coef": "0.01", "lr": about["lr"], "lr-decay-style": "constant",
        "attention-dropout": 0.0, "hidden-dropout": 0.0,
        "load-debug-rollout-data": str(folder / "rollout_{rollout_id}.pt"),
        "save-debug-train-data": str(folder / "train_{rollout_id}.pt"),
        "train-env-vars": json.dumps(
            {"FLUX_MEGATRON_ALLOW": ALLOW, **about["runtime_env"]["env_vars"]}
        ),
    }  # fmt: skip
    flags = ["swiglu", "group-query-attention", "use-rotary-position-embeddings",
             "disable-bias-linear", "qk-layernorm", "untie-embeddings-and-output-weights",
             "use-dynamic-batch-size", "use-kl-loss", "colocate",
             "disable-rollout-global-dataset"]  # fmt: skip
    if about["sp"]:
        flags.append("sequence-parallel")
    if small:
        words["transformer-impl"] = "local"
        flags += ["no-persist-layer-norm", "no-gradient-accumulation-fusion",
                  "no-masked-softmax-fusion", "no-rope-fusion", "no-bias-swiglu-fusion",
                  "use-cpu-initialization"]  # fmt: skip
    given = [f"--{name}" for name in flags]
    for name, value in words.items():
        given += [f"--{name}", str(value)]
    return given


def run(folder: Path, about: Mapping[str, Any]) -> tuple[dict[str, list], list[Any]]:
    """What the steps gave, and the workers."""
    import ray
    from safetensors.torch import load_file
    from slime.ray import actor_group
    from slime.utils.arguments import parse_args
    from train import train

    rollouts(folder, about)
    sys.argv = ["train.py", *arguments(folder, about)]
    args = parse_args()
    if about["device"] == "cpu":  # slime knows bf16 and fp16
        args.bf16, args.params_dtype = False, torch.float32
    groups: list[Any] = []
    create = actor_group.RayTrainGroup.create

    def created(self: Any, *given: Any, **named: Any) -> Any:
        groups.append(self)
        return create(self, *given, **named)

    actor_group.RayTrainGroup.create = created
    hook = {key: value for key, value in about["runtime_env"].items() if key != "env_vars"}
    ray.init(runtime_env=hook, **about["ray"])  # variables are for `--train-env-vars`
    train(args)
    workers = [worker for group in groups for worker in group._actor_handlers]
    seen: dict[str, list] = {"losses": [], "norms": [], "log_probs": [], "step_s": []}
    first = [group._actor_handlers[0] for group in groups]
    for logged in ray.get([worker.__ray_call__.remote(all_logged) for worker in first]):
        steps = [one for one in logged if "train/step" in one]
        seen["losses"] += [one for step in steps for name, one in step.items() if "loss" in name]
        seen["norms"] += [step[name] for step in steps for name in step if "grad_norm" in name]
        seen["step_s"] += [round(one[STEP], 3) for one in logged if STEP in one]
    for step in range(about["steps"]):
        for sample in torch.load(folder / f"train_{step}.pt", weights_only=False)["samples"]:
            seen["log_probs"] += [sample[name].float() for name in GIVEN if name in sample]
    last = folder / f"sent_{about['steps'] - 1}"
    sent = {k: v.float() for path in last.glob("*.safetensors") for k, v in load_file(path).items()}
    seen["sent"] = [sent]
    return seen, workers


def all_logged(_: Any) -> list[dict[str, Any]]:
    """What a worker has logged."""
    from flux_megatron.lab.measure import rl_rank

    return rl_rank.LOGGED

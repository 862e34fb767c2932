"""NeMo-RL's own `Policy` with its Megatron policy workers: log-probabilities, reference, training,
weights by name for a rollout engine, offload.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

EXAMPLE = "examples/configs/grpo_math_1B_megatron.yaml"  # of NeMo-RL's checkout
KEPT: list[Any] = []  # who forgets a policy ends its workers


def configuration(folder: Path, about: Mapping[str, Any]) -> Any:
    import nemo_rl
    from nemo_rl.utils.config import load_config, register_omegaconf_resolvers
    from omegaconf import OmegaConf

    register_omegaconf_resolvers()
    size, small = about["size"], about["device"] == "cpu"
    policy = load_config(Path(nemo_rl.__file__).parents[1] / EXAMPLE).policy
    changes: dict[str, Any] = {
        "model_name": str(folder / "model"), "precision": about["dtype"],
        "train_global_batch_size": size["sequences"] // 2, "train_micro_batch_size": 1,
        "max_total_sequence_length": size["tokens"], "generation.colocated.enabled": True,
        "megatron_cfg.tensor_model_parallel_size": about["tp"],
        "megatron_cfg.sequence_parallel": about["sp"],
        "megatron_cfg.env_vars": dict(about["runtime_env"]["env_vars"]),
        "megatron_cfg.optimizer.lr": about["lr"], "megatron_cfg.train_iters": 1000,
        "megatron_cfg.scheduler.lr_warmup_iters": 0,
        "offload_optimizer_for_logprob": True,
    }  # fmt: skip
    if small:
        at = "megatron_cfg."
        changes |= {
            f"{at}optimizer.bf16": False, f"{at}optimizer.use_precision_aware_optimizer": False,
            f"{at}apply_rope_fusion": False, f"{at}bias_activation_fusion": False,
            f"{at}distributed_data_parallel_config.overlap_grad_reduce": False,
            f"{at}distributed_data_parallel_config.overlap_param_gather": False,
        }  # fmt: skip
    for name, value in changes.items():
        OmegaConf.update(policy, name, value, force_add=True)
    config = OmegaConf.create({"policy": policy})
    return OmegaConf.to_container(config, resolve=True)["policy"]


def batch(size: Mapping[str, int], step: int) -> Any:
    """Prompts and responses of random lengths, padded on the right."""
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    made = torch.Generator().manual_seed(step)
    draw = partial(torch.randint, generator=made)
    n, prompt, response = size["sequences"], size["prompt"], size["response"]
    of_prompt = draw(1, prompt + 1, (n, 1))
    lengths = of_prompt + draw(1, response + 1, (n, 1))
    place = torch.arange(prompt + response)
    tokens = draw(3, size["vocabulary"], (n, prompt + response)) * (place < lengths)
    return BatchedDataDict({
        "input_ids": tokens, "input_lengths": lengths[:, 0].int(), "sample_mask": torch.ones(n),
        "token_mask": ((place >= of_prompt) & (place < lengths)).float(),
        "advantages": torch.randn(tokens.shape, generator=made),
    })  # fmt: skip


def weights(worker: Any) -> None:
    """What a worker would stream to a rollout engine, by name."""
    from flux_megatron.lab.measure import rl_rank

    named = worker._iter_params_with_optional_kv_scales()
    rl_rank.SENT = {name: weight.detach().float().cpu().clone() for name, weight in named}


def run(folder: Path, about: Mapping[str, Any]) -> tuple[dict[str, list], list[Any]]:
    """What each step gave, and the workers."""
    import ray
    from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn
    from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
    from nemo_rl.models.policy.lm_policy import Policy
    from transformers import AutoTokenizer

    os.environ |= {"TORCH_CUDA_ARCH_LIST": "9.0", "NRL_MEGATRON_CHECKPOINT_DIR": str(folder)}
    ray.init(runtime_env=about["runtime_env"], **about["ray"])
    cluster = RayVirtualCluster([about["ranks"]], num_gpus_per_node=about["ranks"])
    policy = Policy(
        cluster, configuration(folder, about), AutoTokenizer.from_pretrained(folder / "model")
    )
    KEPT.append(policy)
    workers = policy.worker_group.workers
    loss_of = ClippedPGLossFn(ClippedPGLossConfig())
    policy.prepare_refit_info()
    seen: dict[str, list] = {"losses": [], "norms": [], "log_probs": [], "step_s": []}
    for step in range(about["steps"]):
        data, begun = batch(about["size"], step), time.perf_counter()
        policy.prepare_for_lp_inference()
        own = policy.get_logprobs(data)["logprobs"]
        reference = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
        data |= {"prev_logprobs": own, "generation_logprobs": own,
                 "reference_policy_logprobs": reference}  # fmt: skip
        policy.prepare_for_training()
        result = policy.train(data, loss_of)
        seen["step_s"].append(round(time.perf_counter() - begun, 3))
        policy.offload_before_refit()
        ray.get([worker.__ray_call__.remote(weights) for worker in workers])
        policy.offload_after_refit()
        seen["losses"] += torch.as_tensor(result["loss"]).flatten().tolist()
        seen["norms"] += torch.as_tensor(result["grad_norm"]).flatten().tolist()
        seen["log_probs"] += [own, reference]
    return seen, workers

"""verl's actor, reference and critic as its own Ray workers, by its trainer's own methods."""

from __future__ import annotations

import time
import types
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch


def configuration(folder: Path, about: Mapping[str, Any]) -> Any:
    from hydra import compose, initialize_config_module

    size = about["size"]
    megatron = {
        "tensor_model_parallel_size": about["tp"], "sequence_parallel": about["sp"],
        "dtype": about["dtype"], "param_offload": True, "optimizer_offload": True,
    }  # fmt: skip
    given = [
        "model_engine=megatron", f"actor_rollout_ref.model.path={folder / 'model'}",
        f"critic.model.path={folder / 'model'}", "critic.enable=True",
        "actor_rollout_ref.rollout.name=vllm", f"trainer.n_gpus_per_node={about['ranks']}",
        f"actor_rollout_ref.rollout.tensor_model_parallel_size={about['tp']}",
        "actor_rollout_ref.actor.use_dynamic_bsz=True", "actor_rollout_ref.actor.use_kl_loss=True",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={size['sequences'] // 2}",
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={size['tokens']}",
        f"data.max_prompt_length={size['prompt']}",
        f"data.max_response_length={size['response']}",
    ]  # fmt: skip
    for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"):
        given += [f"++{role}.megatron.{key}={value}" for key, value in megatron.items()]
    for role in ("actor_rollout_ref.actor", "critic"):  # not only flash-attn's kernels
        at = f"{role}.megatron.override_transformer_config"
        given.append(f"++{at}.attention_backend=auto")
    for role in ("actor_rollout_ref.actor", "critic"):
        given += [
            f"{role}.optim.lr={about['lr']}",
            f"{role}.optim.total_training_steps={about['steps']}",
        ]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=given)


def workers(config: Any, about: Mapping[str, Any]) -> Any:
    """The groups of `RayPPOTrainer.init_workers`, without a rollout server."""
    import ray
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.single_controller.ray.base import create_colocated_worker_cls
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config import TrainingWorkerConfig
    from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
    from verl.workers.utils.losses import value_loss

    critic = omega_conf_to_dataclass(config.critic)
    engine = critic.engine
    engine.infer_max_token_len_per_gpu = critic.ppo_infer_max_token_len_per_gpu
    engine.max_token_len_per_gpu = critic.ppo_max_token_len_per_gpu
    of_critic = TrainingWorkerConfig(
        model_type="value_model", model_config=critic.model, engine_config=engine,
        optimizer_config=critic.optim, checkpoint_config=critic.checkpoint,
    )  # fmt: skip
    role, remote = "actor_rollout_ref", ray.remote
    classes = {
        role: RayClassWithInitArgs(
            cls=remote(ActorRolloutRefWorker), config=config.actor_rollout_ref, role=role
        ),
        "critic": RayClassWithInitArgs(cls=remote(TrainingWorker), config=of_critic),
    }
    pool = RayResourcePool([about["ranks"]], max_colocate_count=1)
    group = RayWorkerGroup(
        resource_pool=pool,
        ray_cls_with_init=create_colocated_worker_cls(class_dict=classes), device_name="cuda",
    )  # fmt: skip
    groups = group.spawn(prefix_set=classes.keys())
    groups["critic"].reset()
    groups["critic"].set_loss_fn(partial(value_loss, config=critic))
    groups[role].init_model()
    return groups[role], groups["critic"], group.workers


def batch(size: Mapping[str, int], step: int) -> Any:
    """Prompts padded on the left, responses on the right, of random lengths."""
    from verl import DataProto

    made = torch.Generator().manual_seed(step)
    draw = partial(torch.randint, generator=made)
    n, prompt, response = size["sequences"], size["prompt"], size["response"]
    of_prompt, of_response = draw(1, prompt + 1, (n, 1)), draw(1, response + 1, (n, 1))
    place = torch.arange(prompt + response)
    mask = (place >= prompt - of_prompt) & (place < prompt + of_response)
    tokens = draw(3, size["vocabulary"], mask.shape) * mask
    answered = mask[:, prompt:].long()
    return DataProto.from_single_dict({
        "prompts": tokens[:, :prompt], "responses": tokens[:, prompt:], "input_ids": tokens,
        "attention_mask": mask.long(), "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "response_mask": answered, "advantages": torch.randn(answered.shape, generator=made),
        "returns": torch.randn(answered.shape, generator=made),
    }, meta_info={"temperature": 1.0, "global_token_num": mask.sum(1).tolist()})  # fmt: skip


def run(folder: Path, about: Mapping[str, Any]) -> tuple[dict[str, list], list[Any]]:
    """What each step gave, and the workers."""
    import ray
    from omegaconf import OmegaConf
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer as Trainer

    config = configuration(folder, about)
    environment = OmegaConf.to_container(
        OmegaConf.merge(get_ppo_ray_runtime_env(config), about["runtime_env"])
    )
    ray.init(runtime_env=environment, **about["ray"])
    actor, critic, processes = workers(config, about)
    trainer = types.SimpleNamespace(
        config=config, actor_rollout_wg=actor, ref_policy_wg=actor, critic_wg=critic,
        ref_in_actor=False, distillation_config=None,
    )  # fmt: skip
    seen: dict[str, list] = {"losses": [], "norms": [], "log_probs": [], "step_s": []}
    for step in range(about["steps"]):
        data, begun = batch(about["size"], step), time.perf_counter()
        data = data.union(Trainer._compute_old_log_prob(trainer, data)[0])
        data = data.union(Trainer._compute_ref_log_prob(trainer, data))
        data = data.union(Trainer._compute_values(trainer, data))
        of_critic = Trainer._update_critic(trainer, data).meta_info["metrics"]
        of_actor = Trainer._update_actor(trainer, data).meta_info["metrics"]
        seen["step_s"].append(round(time.perf_counter() - begun, 3))
        ray.get(actor.update_weights(global_steps=step))
        seen["losses"] += [*of_actor["actor/loss"], *of_critic["critic/loss"]]
        seen["norms"] += [*of_actor["actor/grad_norm"], *of_critic["critic/grad_norm"]]
        for name in ("old_log_probs", "ref_log_prob", "values"):
            seen["log_probs"].append(data.batch[name] * data.batch["response_mask"])
    return seen, processes

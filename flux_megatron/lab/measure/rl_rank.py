"""What Ray's workers of `rl` do before a framework begins, and what they have seen."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from flux_megatron.lab.measure import gpu_run

CPU, SHARED = "RL_ON_CPU", "RL_SHARED_GPUS"  # variables of every worker


def prepare() -> None:
    """Ray's `worker_process_setup_hook`: on the CPU, what answers for a GPU; the rollout."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        import ray

        ray.get_gpu_ids = lambda: [0]
    if SHARED in os.environ:
        gpu_run.share_gpus_of_ray()
    sys.meta_path.append(Absent())
    if CPU in os.environ:
        in_small()
    for name, do in {"verl.workers.engine_workers": prepare_verl,
                     "slime.backends.megatron_utils.actor": watch_slime}.items():  # fmt: skip
        sys.meta_path.insert(0, Before(name, do))


class Before(importlib.abc.MetaPathFinder):
    """Does something when a module is asked for. Not sooner: a framework's import begins CUDA, and
    Ray names the GPU of a worker after its hook.
    """

    def __init__(self, name: str, do: Callable[[], None]) -> None:
        self.name, self.do = name, do

    def find_spec(self, name: str, *_: Any) -> None:
        if name == self.name:
            sys.meta_path.remove(self)
            self.do()


def prepare_verl() -> None:
    """The rollout."""
    from verl.workers.rollout import base

    base._ROLLOUT_REGISTRY[("vllm", "async")] = f"{__name__}.Rollout"
    fuse_gradients()


def fuse_gradients() -> None:
    """Of output layers, for which Megatron asks for apex."""
    if CPU not in os.environ:
        from flux_megatron.integration import apex_shim

        apex_shim.provide_wgrad_kernels()


def let_ray_count_gpus() -> None:
    """Before `ray.init(num_gpus=...)` where fewer GPUs are visible."""
    from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager as Manager

    Manager.get_current_process_visible_accelerator_ids = staticmethod(lambda: None)


def _absent(name: str) -> type:
    """A class, with classes for attributes."""
    if name.startswith("__"):
        raise AttributeError(name)
    return _OfClasses(name, (), {})


class _OfClasses(type):
    def __getattr__(cls, name: str) -> type:
        return _absent(name)


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of rollout engines and trackers that are not there: slime's processes import them."""

    def __init__(self) -> None:
        names = ("sglang", "sglang_router", "mlflow", "swanlab", "wandb")
        self.names = [name for name in names if importlib.util.find_spec(name) is None]

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in self.names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__file__ = None

        module.__getattr__ = _absent  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None: ...


def watch_slime() -> None:
    """Keeps what its workers log; slime refuses numpy 2."""
    import numpy
    from slime.backends.megatron_utils import initialize
    from slime.observability import logging_utils

    initialize.np = types.SimpleNamespace(__version__="1.0", random=numpy.random)
    fuse_gradients()
    log = logging_utils.log

    def kept(args: Any, metrics: dict[str, Any], *given: Any, **named: Any) -> None:
        LOGGED.append(metrics)
        log(args, metrics, *given, **named)

    logging_utils.log = kept


def in_small() -> None:
    torch.set_num_threads(1)
    from flux_megatron.lab.cpu import pretend_gpu

    pretend_gpu()
    packed_attention()
    for name, prepared in OF_FRAMEWORKS.items():
        if importlib.util.find_spec(name):
            prepared()


def slime_in_small() -> None:
    """There is no GPU whose memory its saver could free."""
    import torch_memory_saver
    from slime.ray import actor_group
    from slime.utils import reloadable_process_group
    from slime.utils.accelerator.torch_accelerator import TorchAccelerator

    variables = actor_group.add_default_ray_env_vars

    def without_preload(given: dict[str, str]) -> dict[str, str]:
        return {key: value for key, value in variables(given).items() if key != "LD_PRELOAD"}

    actor_group.add_default_ray_env_vars = without_preload
    names_of_fused_layers()
    TorchAccelerator.current_device = TorchAccelerator.device = lambda *_: "cpu"
    reloadable_process_group._uses_accelerator_backend = lambda backend: True  # gloo's reload too
    saver: Any = types.SimpleNamespace(
        pause=lambda: None, resume=lambda: None, disable=contextlib.nullcontext, _impl=None,
        region=lambda *_, **__: contextlib.nullcontext(), get_cpu_backup=lambda *_, **__: None,
    )  # fmt: skip
    torch_memory_saver.torch_memory_saver = saver


def names_of_fused_layers() -> None:
    """slime converts checkpoints of TransformerEngine's layers only, whose linears hold norms."""
    from slime.backends.megatron_utils import hf_to_megatron, megatron_to_hf

    def renamed(name: str) -> str:
        for local, fused in (("input_layernorm", "self_attention.linear_qkv.layer_norm_"),
                             ("pre_mlp_layernorm", "mlp.linear_fc1.layer_norm_")):  # fmt: skip
            name = name.replace(f"{local}.", fused)
        return name

    load, convert = hf_to_megatron._LOADERS["qwen3"], megatron_to_hf.convert_qwen2_to_hf
    hf_to_megatron._LOADERS["qwen3"] = lambda name, *given: load(renamed(name), *given)
    megatron_to_hf.convert_qwen2_to_hf = lambda args, name, *given: convert(
        args, renamed(name), *given
    )


def verl_in_small() -> None:
    """verl takes bf16 and fp16 only."""
    from verl.workers.config import McoreEngineConfig as Config

    small_providers()
    check = Config.__post_init__

    def checked(self: Any) -> None:
        dtype = self.dtype
        object.__setattr__(self, "dtype", "bfloat16")
        check(self)
        object.__setattr__(self, "dtype", dtype)

    Config.__post_init__ = checked


def packed_attention() -> None:
    """A stand-in for flash attention: each of the packed sequences by itself, on the CPU."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    stock = DotProductAttention.forward

    def forward(self: Any, query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> Any:
        packed = more.get("packed_seq_params")
        if packed is None:
            return stock(self, query, key, value, *rest, **more)
        each = query.shape[1] // key.shape[1]
        ends = packed.cu_seqlens_q_padded
        lengths = (packed.cu_seqlens_q if ends is None else ends).diff().tolist()
        seen = []
        for q, k, v in zip(*(one.split(lengths) for one in (query, key, value)), strict=True):
            q, k, v = (one.transpose(0, 1) for one in (q, k, v))
            k, v = k.repeat_interleave(each, 0), v.repeat_interleave(each, 0)
            seen.append(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1))
        return torch.cat(seen).flatten(1)

    DotProductAttention.forward = forward


def small_providers() -> None:
    """Megatron-Bridge's providers build local layers, without what needs a GPU."""
    from megatron.bridge import AutoBridge

    from flux_megatron.lab.measure.bridge import provider_in_small

    stock = AutoBridge.to_megatron_provider

    def to_megatron_provider(self: Any, *given: Any, **named: Any) -> Any:
        provider = stock(self, *given, **named)
        provider_in_small(provider)
        return provider

    AutoBridge.to_megatron_provider = to_megatron_provider


def nemo_in_small() -> None:
    """NeMo-RL edits a file of TransformerEngine's, and expects a device that has a number."""
    from megatron.bridge.training import initialize
    from nemo_rl.models.policy.workers import megatron_policy_worker as worker

    small_providers()
    worker.apply_transformer_engine_patch = lambda: None
    initialize.compile_helpers = lambda: None  # megatron-core's wheel has them, and no Makefile
    setup = worker.setup_distributed

    def setup_distributed() -> None:
        setup()
        device = torch.cuda.current_device

        def once() -> int:
            torch.cuda.current_device = device
            return 0

        torch.cuda.current_device = once

    worker.setup_distributed = setup_distributed


OF_FRAMEWORKS = {"slime": slime_in_small, "verl": verl_in_small, "nemo_rl": nemo_in_small}


class Rollout:
    """A stand-in for a rollout engine: keeps what it is sent, by name."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.log: list[str] = []

    async def resume(self, tags: list[str]) -> None:
        self.log.append(f"resume {tags}")

    async def release(self) -> None:
        self.log.append("release")

    async def update_weights(self, weights: Any, **_: Any) -> None:
        global SENT
        SENT = {name: weight.detach().float().cpu().clone() for name, weight in weights}


SENT: dict[str, torch.Tensor] = {}
LOGGED: list[dict[str, Any]] = []


def seen_by(_: Any) -> dict[str, Any]:
    """Calls, fallbacks and sent weights of this process."""
    from flux_megatron.overlap.report import report

    calls = report()
    fallbacks = {f"{pattern}: {why}": n for (pattern, why), n in calls.fallbacks.items()}
    return {
        "calls": calls.total, "overlapped": calls.overlapped, "fallbacks": fallbacks,
        "sent": SENT,
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    }  # fmt: skip

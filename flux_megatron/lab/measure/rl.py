"""The actor, reference and critic of verl, slime and NeMo-RL as their own Ray workers: stock, ours.

    python -m flux_megatron.lab.measure.rl rows.jsonl verl
    TRITON_INTERPRET=1 python -m flux_megatron.lab.measure.rl rows.jsonl verl --device cpu

A step is the framework's: log-probabilities, reference, values where there is a critic, training,
offload, weights by name for a rollout engine. A stand-in is the rollout engine alone: sequences are
random, packed to another total each micro-batch, and weights are kept. `rl_verl.py`, `rl_slime.py`
and `rl_nemo.py` call each framework, which must be importable, with slime its checkout of
Megatron-LM too. Every rank is a Ray actor with one GPU, or where ranks share GPUs
(`gpu_run.shared`) with a number that stands for one. A random Qwen3 is made on the spot: on GPUs
of Qwen3-8B's widths and TransformerEngine's layers in bf16; on the CPU tiny, of local layers in
fp32, and `rl_rank.py` says what stands for a GPU.

Arms run one after the other; `ours` is FLUX_MEGATRON_ENABLE=1 where the framework takes variables.
A row an arm: losses and gradient norms, seconds of each step without what goes to the rollout
engine, and of all with the start of the workers, calls, fallbacks with their reasons,
and how far losses, log-probabilities and sent weights are from stock's, relative to the largest.
Exits 1 if an arm failed, is further apart than `BOUND`, or overlapped no call.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import typer

from flux_megatron.lab.bench.provenance import WITHOUT_MULTICAST
from flux_megatron.lab.bench.table_run import append
from flux_megatron.lab.measure import bridge, gpu_run, rl_rank
from flux_megatron.symm.cuda_memory import SHARED_GPUS
from flux_megatron.versions.library import version_of

ARMS = "stock,ours,stock again"
BOUND = {"cpu": 1e-5, "cuda": 5e-2}
SIZES = {
    "8b": {"sequences": 32, "tokens": 16384, "prompt": 1024, "response": 3072},
    "1.7b": {"sequences": 8, "tokens": 2048, "prompt": 128, "response": 384},
    "tiny": {"sequences": 8, "tokens": 64, "prompt": 12, "response": 20},
}
PACKAGES = ("verl", "ray", "megatron-core", "megatron-bridge", "transformer-engine", "torch")
PASSED = (
    "TRITON_INTERPRET", "TORCHDYNAMO_DISABLE", "OMP_NUM_THREADS", "CUDA_DEVICE_MAX_CONNECTIONS",
    "FLUX_MEGATRON_ALLOW", "FLUX_MEGATRON_TUNE", "FLUX_MEGATRON_TIMEOUT_S",
    SHARED_GPUS, rl_rank.CPU, rl_rank.SHARED, *WITHOUT_MULTICAST,
)  # fmt: skip


def make_tokenizer(folder: Path) -> None:
    """Beside the model: frameworks ask for one, and no text is read."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    names = ["<unk>", "<s>", "</s>", *(f"w{number}" for number in range(100))]
    words = Tokenizer(models.WordLevel(dict(zip(names, range(len(names)), strict=True)), "<unk>"))
    PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    ).save_pretrained(folder)


def drive(framework: str, arm: str, folder: Path, about: dict[str, Any]) -> None:
    """The driver of one arm, in a process of its own; `seen.pt` is what it leaves."""
    rl_rank.prepare()
    more = about["device"] == "cpu" or rl_rank.SHARED in os.environ  # workers than GPUs
    if more:
        rl_rank.let_ray_count_gpus()
    variables = {name: os.environ[name] for name in PASSED if name in os.environ}
    if arm == "ours":
        variables["FLUX_MEGATRON_ENABLE"] = "1"
    about["runtime_env"] = {
        "env_vars": variables, "worker_process_setup_hook": f"{rl_rank.__name__}.prepare",
    }  # fmt: skip
    about["ray"] = {"num_cpus": 4, "include_dashboard": False}
    if more:
        about["ray"]["num_gpus"] = about["ranks"]
    import ray

    run = importlib.import_module(f"flux_megatron.lab.measure.rl_{framework}").run
    begun = time.perf_counter()
    seen, workers = run(folder, about)
    seen["seconds"] = round(time.perf_counter() - begun, 1)
    counted = ray.get([worker.__ray_call__.remote(rl_rank.seen_by) for worker in workers])
    seen.setdefault("sent", [counted[0].pop("sent")])
    counts = {name: sum(one[name] for one in counted) for name in ("calls", "overlapped")}
    fallbacks: dict[str, int] = {}
    for one in counted:
        for why, number in one["fallbacks"].items():
            fallbacks[why] = fallbacks.get(why, 0) + number
    peak = max(one["peak_gib"] for one in counted)
    torch.save({**seen, **counts, "fallbacks": fallbacks, "peak_gib": peak}, folder / "seen.pt")


def run_arm(
    framework: str, arm: str, folder: Path, about: Mapping[str, Any], limit_s: float
) -> dict | None:
    """What an arm has seen; None if it failed."""
    (seen := folder / "seen.pt").unlink(missing_ok=True)
    given = ["drive", framework, arm, str(folder), json.dumps(about)]
    environment = {**os.environ, **WITHOUT_MULTICAST, "CUDA_DEVICE_MAX_CONNECTIONS": "1",
                   "NEMO_RL_PY_EXECUTABLES_SYSTEM": "1",
                   "RAY_worker_register_timeout_seconds": "600"}  # fmt: skip
    if about["device"] == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1",
                        rl_rank.CPU: "1", "OMP_NUM_THREADS": "1"}  # fmt: skip
    elif gpu_run.shared(about["ranks"]):
        environment[rl_rank.SHARED] = "1"
    with subprocess.Popen(
        [sys.executable, "-m", __spec__.name, *given], env=environment
    ) as process:
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            status = None
    if status == 0 and seen.exists():
        return torch.load(seen, weights_only=False)
    print(f"{framework} {arm}: FAILED, status {status}", file=sys.stderr, flush=True)
    return None


def _largest(tensors: Iterable[torch.Tensor]) -> float:
    return max((float(one.double().abs().max()) for one in tensors if one.numel()), default=0.0)


def apart(stock: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, float]:
    """How far two arms are apart, relative to the largest of stock; infinite where one has more."""
    pairs: dict[str, tuple[list[Any], list[Any]]] = {
        "losses": ([torch.tensor(stock["losses"])], [torch.tensor(ours["losses"])]),
        "log_probs": (stock["log_probs"], ours["log_probs"]),
    }
    by_name = [arm["sent"][0] for arm in (stock, ours)]
    pairs["sent"] = tuple([one[name] for name in sorted(one)] for one in by_name)  # type: ignore
    found = {}
    for name, (a, b) in pairs.items():
        alike = [one.shape for one in a] == [one.shape for one in b]
        far = _largest(x.double() - y for x, y in zip(a, b, strict=True)) if alike else torch.inf
        found[name] = far / (_largest(a) or 1)
    if by_name[0].keys() != by_name[1].keys():
        found["sent"] = torch.inf
    return found


def rows(
    framework: str, arms: str, folder: Path, about: Mapping[str, Any], limit_s: float
) -> Iterable[dict]:
    """A row an arm that ended well."""
    stock: dict | None = None
    for arm in arms.split(","):
        if (seen := run_arm(framework, arm, folder, about, limit_s)) is None:
            continue
        stock = stock or seen
        far = apart(stock, seen)
        bound = BOUND[about["device"]]
        good = all(one <= bound for one in far.values()) and seen["losses"] != []
        good = good and (arm != "ours" or seen["overlapped"] > 0)
        print(f"{framework} {arm:12} {far} apart, {seen['seconds']} s, {seen['overlapped']} of "
              f"{seen['calls']} calls overlapped {seen['fallbacks']}", flush=True)  # fmt: skip
        numbers = {name: value for name, value in seen.items() if name not in ("log_probs", "sent")}
        yield {"table": "rl", "framework": framework, "arm": arm, "apart": far, "good": good,
               "sent": len(seen["sent"][0]), **numbers, **about}  # fmt: skip


def main(
    out: Path, framework: str, device: str = "cuda", tp: int = 2, ranks: int = 0, steps: int = 0,
    layers: int = 0, widths: str = "", arms: str = ARMS, sp: bool = True, commit: str = "unknown",
    limit_s: float = 580,
) -> None:  # fmt: skip
    """Run the arms of one framework; `widths` are of `bridge.WIDTHS`."""
    small = device == "cpu"
    widths = widths or bridge.OF_DEVICE[device]
    size = {**SIZES[widths], "vocabulary": 100}
    about: dict[str, Any] = {
        "device": device, "tp": tp, "ranks": ranks or tp, "sp": sp, "size": size,
        "widths": widths, "gpus": 0 if small else torch.cuda.device_count(),
        "dtype": "float32" if small else "bfloat16", "layers": layers or (2 if small else 4),
        # bf16's rounding grows with the step: at 1e-3 a critic's loss rose to 98 (frameworks.jsonl)
        "lr": 1e-3 if small else 1e-5,
        "steps": steps or (2 if small else 6), "commit": commit,
        **{name: version_of(name) for name in PACKAGES},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        bridge.make_model(Path(folder) / "model", device, about["layers"], widths)
        make_tokenizer(Path(folder) / "model")
        right = 0
        for row in rows(framework, arms, Path(folder), about, limit_s):
            append(out, [row])
            right += row["good"]
    raise typer.Exit(0 if right == len(arms.split(",")) else 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["drive"]:
        drive(sys.argv[2], sys.argv[3], Path(sys.argv[4]), json.loads(sys.argv[5]))
    else:
        typer.run(main)

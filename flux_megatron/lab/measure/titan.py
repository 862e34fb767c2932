"""torchtitan's trainer on Llama-3 8B of few layers: its tensor parallelism and ours, in turn.

    pip install torchtitan==0.3.0
    python -m flux_megatron.lab.measure.titan rows.jsonl --tp 2
    python -m flux_megatron.lab.measure.titan rows.jsonl --device cpu

Arms: `stock`; `inductor`, its async-TP by the compiler; `fused`, its async-TP by fused projections;
`ours`, by `flux_titan.py` of docs/pytorch.md. On the CPU a tiny Llama-3 runs `stock` and `ours`,
kernels interpreted: `inductor` and `fused` need torch's symmetric memory. Each arm runs eager and
compiled by blocks, or as `--modes` says; `inductor` compiled only. What follows `--` goes to
torchtitan, as `-- activation-checkpoint:none`. More `--ranks` than `--tp` are FSDP's. Text and
tokenizer are made on the spot.

A row a run: losses, gradient norms, milliseconds between steps, calls of ours that overlapped,
graphs and graph breaks of torch.compile. Exits 1 if the losses of an arm are not stock's.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from flux_megatron.lab.bench.provenance import WITHOUT_MULTICAST
from flux_megatron.lab.bench.table_run import append
from flux_megatron.lab.measure.titan_rank import CPU, SEED, TOKENIZER

RANK = "flux_megatron.lab.measure.titan_rank"
CHECKOUT = Path(__file__).parents[3]
ARMS = {"cuda": ("stock", "inductor", "fused", "ours"), "cpu": ("stock", "ours")}
BOUND = {"cuda": 1e-2, "cpu": 1e-5}  # of losses, relative: bf16 and fp32
WORDS = 200


def write_text(folder: Path) -> None:
    """A tokenizer of words, and text of them where torchtitan looks for `c4_test`."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = ["<unk>", "<s>", "</s>", *(f"w{number}" for number in range(WORDS))]
    words = Tokenizer(models.WordLevel(dict(zip(names, range(len(names)), strict=True)), "<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(names[:3])
    (folder / TOKENIZER).mkdir()
    words.save(str(folder / TOKENIZER / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / TOKENIZER / "tokenizer_config.json").write_text(json.dumps(special))
    text = folder / "tests" / "assets" / "c4_test"
    text.mkdir(parents=True)
    drawn = random.Random(SEED)
    lines = (" ".join(drawn.choices(names[3:], k=1000)) for _ in range(1000))
    (text / "data.json").write_text("\n".join(json.dumps({"text": line}) for line in lines))


def command(arm: str, compiled: bool, tp: int, ranks: int, steps: int, seq_len: int) -> list[str]:
    options = [
        "--module", RANK, "--config", "stock" if arm == "inductor" else arm,
        "--training.steps", str(steps), "--training.seq-len", str(seq_len),
        "--parallelism.tensor-parallel-degree", str(tp),
    ]  # fmt: skip
    if compiled:
        options.append("--compile.enable")
    if arm == "inductor":
        options.append("--compile.enable-async-tensor-parallel")
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [sys.executable, *launch, "-m", RANK, *options]


def run(words: list[str], folder: Path, device: str, layers: int) -> dict[str, Any]:
    path = os.pathsep.join(filter(None, (str(CHECKOUT), os.environ.get("PYTHONPATH"))))
    environment = {
        **os.environ, **WITHOUT_MULTICAST, "PYTHONPATH": path, "TITAN_LAYERS": str(layers),
        "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder),
    }  # fmt: skip
    if device == "cpu":
        environment |= {CPU: "1", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    found = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
    if done.returncode or not found:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(found[0].removeprefix("ROW "))


def show(arm: str, row: dict[str, Any], losses: list[float]) -> float:
    """A line of this run; how far its losses are from these, relative."""
    pairs = zip(row["losses"], losses, strict=True)
    apart = max(abs(a - b) / b for a, b in pairs)
    ms = statistics.median(row["ms"][1:] or row["ms"])
    print(
        f"{arm:8} compiled {row['compiled']!s:5} loss {row['losses'][-1]:.6f}, {apart:.1e} apart, "
        f"{ms:.1f} ms, {row['overlapped']} of {row['calls']} calls overlapped, "
        f"{row['graph_breaks']} graph breaks", flush=True,
    )  # fmt: skip
    return apart


def main(
    out: Path, options: Annotated[list[str] | None, typer.Argument()] = None,
    commit: str = "unknown", tp: int = 2, ranks: int = 0, steps: int = 0, layers: int = 0,
    rounds: int = 0, device: str = "cuda", arms: str = "", modes: str = "eager,compiled",
) -> None:  # fmt: skip
    """Run every arm `rounds` times, in turn; the first one has the losses of the others."""
    small, ranks, options = device == "cpu", ranks or tp, options or []
    steps, rounds = steps or (3 if small else 20), rounds or (1 if small else 3)
    layers = layers or (2 if small else 4)
    about = {
        "table": "titan", "torchtitan": importlib.metadata.version("torchtitan"),
        "torch": importlib.metadata.version("torch"), "device": device, "commit": commit, "tp": tp,
        "ranks": ranks, "layers": layers, "options": options,
    }  # fmt: skip
    worst = 0.0
    with tempfile.TemporaryDirectory() as name:
        write_text(Path(name))
        for number, mode in itertools.product(range(rounds), modes.split(",")):
            compiled = {"eager": False, "compiled": True}[mode]
            losses: list[float] = []
            for arm in arms.split(",") if arms else ARMS[device]:
                if arm == "inductor" and not compiled:
                    continue
                words = command(arm, compiled, tp, ranks, steps, 32 if small else 8192)
                row = run([*words, *options], Path(name), device, layers)
                row = {**about, "arm": arm, "compiled": compiled, "round": number, **row}
                append(out, [row])
                losses = losses or row["losses"]
                worst = max(worst, show(arm, row, losses))
    raise SystemExit(0 if worst <= BOUND[device] else 1)


if __name__ == "__main__":
    typer.run(main)

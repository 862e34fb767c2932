"""The command `flux-megatron simulate`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from flux_megatron.errors import BadInput

NAME = "study/one-node"  # which the options fill in
WHAT = "As paper/gpt3-175b_a100-pcie, or a YAML; without one give --gpu, --tp, --hidden ..."
Size = int | None
Texts = list[str] | None
HEAD = 128  # columns of an attention head, where their number is not given


# of a GPU: GiB by its driver, its link, and that one's GB/s in one direction by data sheet
MACHINES = {
    "H200": (140, "nvlink", 450),
    "H100": (80, "nvlink", 450),
    "H800": (80, "nvlink", 200),
    "A100": (80, "nvlink", 300),
    "A100-PCIE": (80, "pcie", 32),
}


def simulate(
    name: Annotated[str | None, typer.Argument(metavar="[EXPERIMENT]", help=WHAT)] = None,
    arm: Annotated[list[str] | None, typer.Option(help="Only these arms")] = None,
    set_: Annotated[Texts, typer.Option("--set", metavar="KEY=VALUE", help="Other values")] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Also other values of assumptions")
    ] = False,
    gpu: Annotated[str | None, typer.Option(help=f"{', '.join(MACHINES)}")] = None,
    tp: Annotated[Size, typer.Option(min=1, help="Ranks that share a layer, 4 by default")] = None,
    dp: Annotated[Size, typer.Option(min=1, help="Replicas on the node, 1 by default")] = None,
    hidden: Annotated[Size, typer.Option(min=1, help="Width, Llama-2 70B's by default")] = None,
    layers: Annotated[Size, typer.Option(min=1, help="8 by default")] = None,
    heads: Annotated[Size, typer.Option(min=1, help="HIDDEN / 128 by default")] = None,
    kv_heads: Annotated[Size, typer.Option(min=1, help="HEADS by default")] = None,
    ffn: Annotated[Size, typer.Option(min=1, help="Of the MLP, 4 HIDDEN by default")] = None,
    vocab: Annotated[Size, typer.Option(min=1, help="32000 by default")] = None,
    seq_length: Annotated[Size, typer.Option(min=1, help="4096 by default")] = None,
    swiglu: Annotated[bool | None, typer.Option(help="SwiGLU, as by default, or GELU")] = None,
    micro_batch: Annotated[Size, typer.Option(min=1, help="Sequences, 1 by default")] = None,
    assumptions: Annotated[bool, typer.Option("--assumptions", help="With reasons")] = False,
    json_: Annotated[Path | None, typer.Option("--json", help="All figures; -: to stdout")] = None,
) -> None:
    """Predict what a step of an experiment's arms takes, and what of it is exposed.

    docs/cluster.md says how to read the output, docs/reference/cost_model.md how far off it is.
    """
    from rich.console import Console

    from flux_megatron import option_values
    from flux_megatron.lab.simulate import predictions, study, tables

    options = {
        "cluster.gpu": gpu, "parallel.tp": tp, "parallel.dp": dp, "model.hidden": hidden,
        "model.layers": layers, "model.heads": heads, "model.kv_heads": kv_heads, "model.ffn": ffn,
        "model.vocab": vocab, "model.seq_length": seq_length, "model.swiglu": swiglu,
        "training.micro_batch": micro_batch,
    }  # fmt: skip
    of_options = {key: value for key, value in options.items() if value is not None}
    name, overrides = _what(name, of_options, set_ or [])
    if json_ is not None:
        option_values.json_target(json_)
    if study.is_study(name):
        if arm:
            raise BadInput(f"{name}: --set, --sweep and --json expected with a study")
        of_study = study.load(name, overrides)
        shown = [*study.shown(of_study, sweep)]
        plain = study.plain(of_study, sweep)
    else:
        found = predictions.predict(name, overrides, arm or [], sweep)
        shown = [*tables.tables(found), *tables.remarks(found, assumptions)]
        plain = tables.plain(found)
    if json_ != option_values.STDOUT:
        console = Console()
        console = console if console.is_terminal else Console(width=120)
        for item in shown:
            console.print(item, soft_wrap=isinstance(item, str), highlight=False, markup=False)
    if json_ is not None:
        option_values.write_json(json_, plain)


def _what(
    name: str | None, of_options: dict[str, Any], texts: list[str]
) -> tuple[str, dict[str, Any]]:
    """The file and the values for it. `BadInput` unless one of the two is given."""
    from flux_megatron import config_files
    from flux_megatron.launch.experiment import EXAMPLE

    if name and of_options:
        raise BadInput(f"{name}: no --gpu, --tp, --hidden ... beside it; --set changes its values")
    if not name and not of_options:
        raise BadInput("an experiment, or --gpu H100 --tp 8 --hidden 8192 expected")
    overrides = {} if name else values(of_options)
    return name or NAME, overrides | config_files.overrides(texts, EXAMPLE)


def values(given: Mapping[str, Any]) -> dict[str, Any]:
    """What was given, and what follows from it, by dotted keys: one node of as many GPUs as the
    ranks; of --hidden heads of 128, keys and values for every head, an MLP of four times the width.
    `BadInput` for a GPU without a model, or a width that gives no heads.
    """
    found = {"cluster.gpu": "H200", "parallel.tp": 4, "parallel.dp": 1, **given}
    if (name := found["cluster.gpu"]) not in MACHINES:
        raise BadInput(f"--gpu {name}: one of {', '.join(MACHINES)} expected")
    of_link = ("cluster.memory_gib", "cluster.link.kind", "cluster.link.bandwidth_gbps")
    found |= dict(zip(of_link, MACHINES[name], strict=True))
    found["cluster.gpus_per_node"] = found["parallel.tp"] * found["parallel.dp"]
    found["training.global_batch"] = found.get("training.micro_batch", 1) * found["parallel.dp"]
    if (hidden := given.get("model.hidden")) is None:
        return found
    if not (heads := given.get("model.heads", hidden // HEAD)):
        raise BadInput(f"--hidden {hidden}: at least {HEAD} expected, or --heads with it")
    return {"model.heads": heads, "model.kv_heads": heads, "model.ffn": 4 * hidden} | found

"""The command `flux-megatron simulate`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flux_megatron.simulate import given

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from flux_megatron.simulate.predictions import Predictions


GPUS_MAX = 1 << 20  # of a sweep


def simulate(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[EXPERIMENT]",
            help="As paper/gpt3-175b_a100-pcie or study/dlrm-128-nodes, or a YAML; without one, "
            "give --gpu, --tp, --hidden ...",
        ),
    ] = None,
    arm: Annotated[list[str] | None, typer.Option(help="Only these arms")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Other values")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="gpus=A..B | assumed",
            help="A, 2A, 4A ... B GPUs, each with its best split; or the experiment's other values "
            "of what it assumes",
        ),
    ] = None,
    nic_gbps: Annotated[
        float | None, typer.Option(help="Gb/s of each network card, as between sites")
    ] = None,
    nic_latency_us: Annotated[float | None, typer.Option(help="Of a message between nodes")] = None,
    gpu: Annotated[
        str | None, typer.Option(help=f"{', '.join(given.MACHINES)}; with NVLink but the last")
    ] = None,
    tp: Annotated[
        int | None, typer.Option(min=1, help="Ranks that share a layer, 4 by default")
    ] = None,
    dp: Annotated[
        int | None, typer.Option(min=1, help="Replicas on the same node, 1 by default")
    ] = None,
    hidden: Annotated[
        int | None, typer.Option(min=1, help="Width; without the rest, Llama's 8192")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="8 by default")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="HIDDEN / 128 by default")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="HEADS by default")] = None,
    ffn: Annotated[
        int | None, typer.Option(min=1, help="Width of the MLP, 4 HIDDEN by default")
    ] = None,
    vocab: Annotated[int | None, typer.Option(min=1, help="32000 by default")] = None,
    seq_length: Annotated[int | None, typer.Option(min=1, help="4096 by default")] = None,
    swiglu: Annotated[bool | None, typer.Option(help="SwiGLU, as by default, or GELU")] = None,
    micro_batch: Annotated[int | None, typer.Option(min=1, help="Sequences, 1 by default")] = None,
    assumptions: Annotated[
        bool, typer.Option("--assumptions", help="List what is assumed, with its reasons")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the timeline, a PNG")] = None,
    json_: Annotated[Path | None, typer.Option("--json", help="Write all figures there")] = None,
) -> None:
    """Predict what a step of an experiment's arms takes, and what of it is exposed.

    docs/simulator.md has the model and how to read the output.
    """
    from flux_megatron import option_values
    from flux_megatron.simulate import predictions, study

    of_options = given.Given(gpu, tp, dp, hidden, layers, heads, kv_heads, ffn, vocab, seq_length,
                             swiglu, micro_batch)  # fmt: skip
    try:
        name, overrides = _what(name, of_options, set_ or [])
        gpus, alternatives = _sweeps(sweep or [])
        option_values.number("--nic-gbps", nic_gbps, unit="Gb/s")
        option_values.number("--nic-latency-us", nic_latency_us, zero=True, unit="microseconds")
        if json_ is not None:
            option_values.file("--json", json_)
        if study.is_study(name):
            if arm or gpus or nic_gbps is not None or nic_latency_us is not None or out:
                raise ValueError(f"{name}: --set, --sweep assumed and --json expected with a study")
            _study(name, overrides, alternatives, json_)
            return
        if out is not None:
            option_values.folder("--out", out)
        network = predictions.Network(nic_gbps, nic_latency_us)
        found = predictions.predict(name, overrides, arm or [], network, gpus, alternatives)
    except ValueError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    _show(found, assumptions, out, json_)


def _study(name: str, overrides: dict[str, Any], alternatives: bool, json_: Path | None) -> None:
    from flux_megatron.simulate import dlrm_tables, study

    found = study.load(name, overrides)
    _print(dlrm_tables.shown(found, alternatives))
    if json_ is not None:
        json_.write_text(json.dumps(dlrm_tables.plain(found, alternatives)) + "\n")


def _show(found: Predictions, assumptions: bool, out: Path | None, json_: Path | None) -> None:
    from flux_megatron.perf import timeline
    from flux_megatron.simulate import tables

    console = _print((*tables.tables(found), *tables.remarks(found, assumptions)))
    if json_ is not None:
        json_.write_text(json.dumps(tables.plain(found), indent=2) + "\n")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        file = out / f"{found.experiment.name.replace('/', '_')}.png"
        timeline.draw(found.workloads, file, tables.title(found))
        console.print(f"wrote {file}", soft_wrap=True, highlight=False)


def _what(
    name: str | None, of_options: given.Given, texts: list[str]
) -> tuple[str, dict[str, Any]]:
    """The file and the values for it. `ValueError` unless one of the two is given."""
    from flux_megatron.launch.experiment import parse_override

    if name and of_options:
        raise ValueError(
            f"{name}: no --gpu, --tp, --hidden ... beside it; --set changes its values"
        )
    if not name and not of_options:
        raise ValueError("an experiment, or --gpu H100 --tp 8 --hidden 8192 expected")
    overrides = {} if name else given.values(of_options)
    return name or given.NAME, overrides | dict(map(parse_override, texts))


def _print(items: Iterable[str | Table]) -> Console:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    for item in items:
        console.print(item, soft_wrap=isinstance(item, str), highlight=False, markup=False)
    return console


def _sweeps(texts: list[str]) -> tuple[list[int], bool]:
    """(numbers of GPUs, whether other values are swept). `ValueError` for anything else."""
    gpus, alternatives = [], False
    for text in texts:
        bounds = re.fullmatch(r"gpus=(\d+)(?:\.\.(\d+))?", text)
        if text == "assumed":
            alternatives = True
        elif bounds and 0 < int(bounds[1]) <= int(bounds[2] or bounds[1]) <= GPUS_MAX:
            first, last = int(bounds[1]), int(bounds[2] or bounds[1])
            gpus += [first << n for n in range((last // first).bit_length())]
        else:
            raise ValueError(
                f"--sweep {text} given, assumed or gpus=FIRST..LAST expected, such as "
                f"gpus=8..16384; at most {GPUS_MAX}"
            )
    return gpus, alternatives

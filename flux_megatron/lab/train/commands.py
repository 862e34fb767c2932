"""The command `flux-megatron train`."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from flux_megatron import command_errors, option_values

OPTIONS = {"parallel.tp": "--tp", "train.steps": "--steps", "data.path": "--data"}


def train(
    config: Annotated[Path, typer.Option(help="YAML file, or demo or h200, which we ship")],
    out: Annotated[Path | None, typer.Option(help="Folder of this run; default out/CONFIG")] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel ranks")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of text files")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any other key")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Train stock layers too; fail where they differ")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in OUT, also on other --tp ranks")
    ] = False,
) -> None:
    """Pretrain a GPT with megatron-core on our layers."""
    command_errors.require("train", "megatron.core", "numpy", "psutil")
    from flux_megatron.lab.train import config as configs
    from flux_megatron.lab.train.rank_process import INTERRUPTED

    overrides: dict[str, Any] = dict(map(configs.parse_override, set_ or []))
    flags = {"parallel.tp": tp, "train.steps": steps, "data.path": data}
    flags = {key: value for key, value in flags.items() if value is not None}
    overrides |= flags
    if "data.path" in overrides and overrides["data.path"] is not None:
        overrides["data.path"] = option_values.absolute(str(overrides["data.path"]))
    folder = option_values.absolute(out or Path("out") / config.stem)
    run = configs.load(config, overrides, {key: OPTIONS[key] for key in flags})
    code = _train(run, folder, resume, compare)
    if code == INTERRUPTED and "RANK" not in os.environ:
        typer.echo(f"to go on: {_again(sys.argv[1:])}", err=True)
    raise typer.Exit(code)


def _again(words: list[str]) -> str:
    """The command line that continues the run of these words."""
    return shlex.join(["flux-megatron", *words, *["--resume"] * ("--resume" not in words)])


def _train(run: Any, out: Path, resume: bool, compare: bool) -> int:
    from flux_megatron.lab.train import compare as comparison
    from flux_megatron.lab.train import launcher

    if "RANK" in os.environ:
        return _train_under_torchrun(run, out, resume, compare)
    if compare:
        return comparison.compare(run, out, resume)
    return launcher.train(run, out, resume)


def _train_under_torchrun(run: Any, out: Path, resume: bool, compare: bool) -> int:
    """This process is a rank that somebody else started."""
    from flux_megatron.lab.train import config, launcher, run_folder, worker

    if compare:
        raise config.ConfigError("--compare starts its own ranks: run it without torchrun")
    ranks = int(os.environ["WORLD_SIZE"])
    if ranks % run.parallel.tp:
        raise config.ConfigError(
            f"parallel.tp={run.parallel.tp} given, a divisor of torchrun's {ranks} ranks expected"
        )
    run.microbatches(ranks // run.parallel.tp)
    on_gpu = run.parallel.device != "cpu" and launcher.gpu_count() > 0
    os.environ.update(launcher.layer_environment(run, on_gpu))
    if os.environ["RANK"] != "0":
        return worker.train(run, out, resume, None)
    from rich.console import Console

    # a job that is queued again resumes, also where its first start did not come so far
    resume = resume and (out / run_folder.CONFIG).is_file()
    launcher.check(run, ranks, out, resume)
    with run_folder.claimed(run, out, resume):
        return worker.train(run, out, resume, Console(file=sys.stdout))

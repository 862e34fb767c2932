"""The command `flux-megatron`. Commands import what they need when they run: `--help` is quick."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def _main() -> None:
    """Tensor-parallel layers for Megatron that hide communication behind GEMMs."""


@app.command()
def train(
    config: Annotated[Path, typer.Option(help="YAML file, such as configs/train/demo.yaml")],
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
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in OUT")] = False,
) -> None:
    """Pretrain a GPT with megatron-core on our layers."""
    from flux_megatron.train import config as configs

    try:
        overrides: dict[str, Any] = dict(map(configs.parse_override, set_ or []))
        flags = {"parallel.tp": tp, "train.steps": steps, "data.path": data}
        overrides |= {key: value for key, value in flags.items() if value is not None}
        if "data.path" in overrides:
            overrides["data.path"] = str(Path(overrides["data.path"]).resolve())
        run = configs.load(config, overrides)
        code = _train(run, (out or Path("out") / config.stem).resolve(), resume, compare)
    except configs.ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(code)


def _train(run: Any, out: Path, resume: bool, compare: bool) -> int:
    from flux_megatron.train import compare as comparison
    from flux_megatron.train import launcher

    if "RANK" in os.environ:
        return _train_under_torchrun(run, out, resume, compare)
    try:
        if compare:
            return comparison.compare(run, out, resume)
        return launcher.train(run, out, resume)
    except launcher.RankFailure as failure:
        typer.echo(str(failure), err=True)
        return 1


def _train_under_torchrun(run: Any, out: Path, resume: bool, compare: bool) -> int:
    """This process is a rank that somebody else started."""
    from flux_megatron.train import config, launcher, run_folder, worker

    if compare:
        raise config.ConfigError("--compare starts its own ranks: run it without torchrun")
    run.microbatches(int(os.environ["WORLD_SIZE"]) // run.parallel.tp)
    on_gpu = run.parallel.device != "cpu" and launcher.gpu_count() > 0
    os.environ.update(launcher.layer_environment(run, on_gpu))
    console = None
    if os.environ["RANK"] == "0":
        from rich.console import Console

        run_folder.prepare(run, out, resume)
        console = Console(file=sys.stdout)
    return worker.run(run, out, resume, console)


if __name__ == "__main__":
    app()

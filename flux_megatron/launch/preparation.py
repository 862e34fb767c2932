"""What is looked at before a launch: arguments, the checkout; and all of it in print."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from flux_megatron.launch import parser_signature
from flux_megatron.launch.command_line import Command, option_lines
from flux_megatron.launch.experiment import Experiment
from flux_megatron.launch.site import LaunchError


def check_arguments(experiment: Experiment, commands: Sequence[Command]) -> None:
    """`LaunchError` unless the parser of the release that the experiment names takes them all."""
    if experiment.program == "train":
        return
    if experiment.megatron_lm not in parser_signature.releases():
        raise LaunchError(
            f"megatron_lm: {experiment.megatron_lm} given, one of {parser_signature.releases()} "
            "expected: the arguments of no other are known"
        )
    errors = [
        f"arm {command.arm}: {error}"
        for command in commands
        for error in parser_signature.check(
            [*command.arguments, *command.on_resume], experiment.megatron_lm
        )
    ]
    if errors:
        raise LaunchError("\n".join(errors))


def check_checkout(experiment: Experiment, checkout: Path | None) -> Iterator[str]:
    """Remarks on the checkout; `LaunchError` where one is needed and there is none."""
    if experiment.program == "train":
        return
    if checkout is None or not (checkout / "pretrain_gpt.py").is_file():
        found = f"{checkout} has no pretrain_gpt.py" if checkout else "none given"
        raise LaunchError(f"--megatron-lm: {found}, a checkout of {experiment.megatron_lm} needed")
    found = version(checkout)
    if found not in experiment.megatron_lm:
        yield f"{checkout} is {found}, the experiment was written for {experiment.megatron_lm}"


def version(checkout: Path) -> str:
    """Such as 0.16.1, read from the sources."""
    file = checkout / "megatron" / "core" / "package_info.py"
    text = file.read_text() if file.is_file() else ""
    parts = [re.search(rf"^{name} = (\d+)", text, re.M) for name in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(part.group(1) for part in parts if part) or "of an unknown version"


def shown(experiment: Experiment, commands: Sequence[Command], job: str) -> str:
    """Everything that a launch would write and start."""
    lines = [f"# {experiment.name}: program {experiment.program}, {experiment.megatron_lm}"]
    for command in commands:
        lines += ["", f"## arm {command.arm}", "# environment"]
        lines += [f"{name}={shlex.quote(text)}" for name, text in command.environment.items()]
        lines += ["# torchrun", command.torchrun(), "# arguments"]
        lines += option_lines(command.arguments)
        if command.on_resume:
            lines += [f"# after a requeue also: {shlex.join(command.on_resume)}"]
        else:
            lines += ["# no checkpoints: after a requeue the arm starts anew (--save-interval)"]
        for name, text in command.files.items():
            lines += [f"# {command.folder / name}", text.rstrip()]
    return "\n".join([*lines, "", "## job.sbatch", job])

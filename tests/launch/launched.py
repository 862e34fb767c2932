"""`flux-megatron launch` as a test calls it, and what it prints, read back."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from typer.testing import CliRunner

from flux_megatron.cli import app
from flux_megatron.launch.job import Settings

GPT, LLAMA = "paper/gpt3-175b_a100-pcie", "paper/llama2-70b_h800-nvlink"


def launch(*arguments: object, code: int = 0) -> str:
    """The output of a launch that ends with `code`."""
    done = CliRunner().invoke(app, ["launch", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done.output


def directives(job: str) -> dict[str, str | None]:
    """The options of the #SBATCH lines."""
    found = re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", job, re.M)
    return {name: value or None for name, value in found}


def settings(job: str) -> Settings:
    """What a job.sbatch gives to job.py."""
    return Settings(**json.loads(shlex.split(job.partition("\nexec ")[2])[-1]))


def arms(name: str, *options: object, rounds: int = 0) -> dict[str, str]:
    """command.sh of each arm as --dry-run prints it."""
    output = launch(name, "--dry-run", "--alternate", rounds, *options)
    parts = re.split(r"^## (?:arm (\S+)|job.sbatch)\n", output, flags=re.M)[1:-2]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def variables(script: str) -> dict[str, str]:
    """Those of the ranks that a command.sh starts."""
    words = shlex.split(script.split("\npython=(\n")[1].split("\n)\n")[0])
    assert words[0] == "env"
    return dict(word.split("=", 1) for word in words[1:-1])


def given(script: str) -> dict[str, list[str]]:
    """The options of the program that a command.sh starts, each with its values."""
    words = shlex.split(script.split("\nprogram=(\n")[1].split("\n)\n")[0])
    found: dict[str, list[str]] = {"": []}
    for word in words[1:] if words[0] == "-m" else words:
        if word.startswith("--"):
            assert word not in found, f"{word} is given twice"
            found[word] = []
        else:
            found[[*found][-1]].append(word)
    return found


def checkout(folder: Path, version: str = "0.16.1") -> Path:
    """As much of Megatron-LM as a launch looks at."""
    core = folder / "Megatron-LM" / "megatron" / "core"
    core.mkdir(parents=True)
    (folder / "Megatron-LM" / "pretrain_gpt.py").touch()
    names = ("MAJOR", "MINOR", "PATCH")
    lines = [f"{name} = {number}\n" for name, number in zip(names, version.split("."), strict=True)]
    (core / "package_info.py").write_text("".join(lines))
    return folder / "Megatron-LM"

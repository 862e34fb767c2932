"""What differs from cluster to cluster: the Python, containers, modules, partitions, variables."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flux_megatron import config_files
from flux_megatron.launch import schema
from flux_megatron.launch.container import Container
from flux_megatron.launch.errors import LaunchError
from flux_megatron.launch.workload import Arm

Options = dict[str, str | int | None]


class Site(BaseModel):
    """`sbatch`, `srun`: options by their long names, null for one without a value.

    `setup`: lines of bash that every node runs first; `environment`: variables, set after ours.
    `silent_s`: a job whose ranks have written nothing for so long hangs. `retries`: how often a job
    queues up again in a row without a new checkpoint. `preflight`: nodes are examined first.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    python: str = sys.executable
    container: Container | None = None
    setup: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    sbatch: Options = {}
    srun: Options = {}
    silent_s: Annotated[int, Field(ge=1)] = 1800
    retries: Annotated[int, Field(ge=0)] = 2
    preflight: bool = True


def load(file: Path | None, sbatch: Iterable[str] = (), environment: Iterable[str] = ()) -> Site:
    """The site of a YAML file, with `KEY=VALUE` (or KEY) options upon it."""
    raw: dict[str, Any] = {}
    if file is not None:
        try:
            raw = config_files.read(file)
        except ValueError as error:
            raise LaunchError(f"{file}: {error}") from None
    if raw.get("container"):
        raw = {"python": "python3"} | raw  # ours is outside
    try:
        site = Site.model_validate(raw)
    except ValidationError as error:
        raise LaunchError(f"{file}: {schema.said(error)}") from None
    options = site.sbatch | dict(_pair("--sbatch", text) for text in sbatch)
    variables = site.environment | dict(_pair("--env", text) for text in environment)
    if None in variables.values():
        raise LaunchError(f"--env {[*environment]} given, KEY=VALUE expected")
    return site.model_copy(update={"sbatch": options, "environment": variables})


def check_images(site: Site, arms: Iterable[Arm]) -> None:
    """`LaunchError` unless every arm has an image, where there are containers at all."""
    missing = [arm for arm in arms if site.container and not site.container.image_of(arm)]
    if missing:
        raise LaunchError(
            f"container.image: none given, and none in container.images for {missing}"
        )


def _pair(option: str, text: str) -> tuple[str, str | None]:
    key, equals, value = text.partition("=")
    key = key.strip().removeprefix("--")
    if not key:
        raise LaunchError(f"{option} {text!r} given, KEY=VALUE expected")
    return key, value if equals else None

"""What differs from cluster to cluster: the Python, modules to load, partitions, variables."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError


class LaunchError(ValueError):
    """Why an experiment cannot be launched so, or here."""


class Site(BaseModel):
    """`sbatch`: options of sbatch by their long names, null for one without a value.

    `setup`: lines of bash that every node runs first; `environment`: variables, set after ours.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    python: str = sys.executable
    setup: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    sbatch: dict[str, str | int | None] = {}


def load(file: Path | None, sbatch: Iterable[str] = (), environment: Iterable[str] = ()) -> Site:
    """The site of a YAML file, with `KEY=VALUE` (or KEY) options upon it."""
    raw: Any = {}
    if file is not None:
        try:
            raw = yaml.safe_load(file.read_text()) or {}
        except (OSError, yaml.YAMLError) as error:
            raise LaunchError(f"{file}: {error}") from None
    try:
        site = Site.model_validate(raw)
    except ValidationError as error:
        found = error.errors()[0]
        key = ".".join(map(str, found["loc"]))
        raise LaunchError(f"{file}: {key or 'the file'}: {found['msg']}") from None
    options = dict(_pair("--sbatch", text) for text in sbatch)
    variables = dict(_pair("--env", text) for text in environment)
    if None in variables.values():
        raise LaunchError(f"--env {[*environment]} given, KEY=VALUE expected")
    return site.model_copy(
        update={
            "sbatch": site.sbatch | options,
            "environment": site.environment | variables,
        }
    )


def _pair(option: str, text: str) -> tuple[str, str | None]:
    key, equals, value = text.partition("=")
    key = key.strip().removeprefix("--")
    if not key:
        raise LaunchError(f"{option} {text!r} given, KEY=VALUE expected")
    return key, value if equals else None

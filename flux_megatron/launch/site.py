"""What differs from cluster to cluster: the Python, containers, modules, partitions, variables.

The ranks of an arm run in a container by options that pyxis gives srun. It sees the run's folder,
the checkout and the data at their own paths.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from flux_megatron import config_files
from flux_megatron.launch import schema
from flux_megatron.launch.errors import LaunchError
from flux_megatron.launch.workload import Arm

Options = dict[str, str | int | None]


def _like(pattern: str, expected: str) -> AfterValidator:
    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"{text!r} given, {expected} expected")
        return text

    return AfterValidator(check)


MOUNT = "/HOST[:/CONTAINER[:FLAG+FLAG]], such as /a:/b:ro,"
Mount = Annotated[str, _like(r"/[^:,\s]*(:/[^:,\s]*(:[a-z+-]+)?)?", MOUNT)]
# A squashfs file is looked for on the nodes, from whatever folder they start in.
Image = Annotated[
    str,
    _like(r"\S+", "an image such as nvcr.io#nvidia/pytorch:26.03-py3"),
    _like(r"/.*|.*(?<!\.sqsh)(?<!\.squashfs)", "an absolute path"),
]


class Container(BaseModel):
    """`image`: of arms that `images` has not. `mounts`: beside what every run needs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    image: Image | None = None
    images: dict[Arm, Image] = {}
    mounts: tuple[Mount, ...] = ()

    def image_of(self, arm: Arm) -> str | None:
        return self.images.get(arm, self.image)

    def words(self, arm: Arm, folders: Iterable[Path]) -> str:
        """Further options of srun, for bash. The site's mount of a folder replaces ours."""
        given = {mount.split(":")[0]: mount for mount in self.mounts}
        mounted = given | {one: one for one in map(str, folders) if one not in given}
        mounts = ",".join(one if ":" in one else f"{one}:{one}" for one in mounted.values())
        image = str(self.image_of(arm))
        options = [f"--container-image={image}", f"--container-mounts={mounts}"]
        # a name, the same for arms of one image: doctor, preflight and ranks share the container
        name = hashlib.sha256(image.encode()).hexdigest()[:8]
        return f'{shlex.join(options)} --container-name=flux_megatron-{name}-"$SLURM_JOB_ID"'


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

    def reach(self, arm: Arm, folders: Iterable[Path]) -> str:
        """What srun is given to run something where the ranks of an arm run, as words of bash."""
        words = shlex.join(option_words(self.srun))
        return f"{words} {self.container.words(arm, folders) if self.container else ''}".strip()


def option_words(options: Options) -> list[str]:
    """Of srun or sbatch; null for one without a value."""
    return [f"--{key}" if text is None else f"--{key}={text}" for key, text in options.items()]


def load(file: Path | None, sbatch: Iterable[str] = (), environment: Iterable[str] = ()) -> Site:
    """The site of a YAML file, with `KEY=VALUE` (or KEY) options upon it."""
    try:
        raw: dict[str, Any] = config_files.read(file) if file else {}
        if raw.get("container"):
            raw = {"python": "python3"} | raw  # ours is outside
        site = Site.model_validate(raw)
    except ValueError as error:  # pydantic's is one
        text = schema.said(error) if isinstance(error, ValidationError) else str(error)
        raise LaunchError(f"{file}: {text}") from None
    options = site.sbatch | dict(_pair("--sbatch", text) for text in sbatch)
    variables = site.environment | dict(_pair("--env", text) for text in environment)
    if None in variables.values():
        raise LaunchError(f"--env {[*environment]} given, KEY=VALUE expected")
    return site.model_copy(update={"sbatch": options, "environment": variables})


def _pair(option: str, text: str) -> tuple[str, str | None]:
    key, equals, value = text.partition("=")
    if key := key.strip().removeprefix("--"):
        return key, value if equals else None
    raise LaunchError(f"{option} {text!r} given, KEY=VALUE expected")

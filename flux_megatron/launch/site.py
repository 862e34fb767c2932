"""What differs from cluster to cluster: the Python, containers, modules, partitions, variables.

The ranks of an arm run in a container by options that pyxis gives srun. It sees the run's folder,
the checkout and the data at their own paths.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from flux_megatron import config_files
from flux_megatron.launch import schema, slurm_options
from flux_megatron.launch.errors import LaunchError
from flux_megatron.launch.slurm_options import OfSbatch, OfSite, OfSrun, worded
from flux_megatron.launch.workload import Arm, Variable

Mount = Annotated[
    str,
    Field(pattern=r"^/[^:,\s]*(:/[^:,\s]*(:[a-z+-]+)?)?\Z"),
    worded("/HOST[:/CONTAINER[:FLAG+FLAG]], such as /a:/b:ro,"),
]
# A squashfs file is looked for on the nodes, from whatever folder they start in.
Image = Annotated[
    str,
    Field(pattern=r"^(/\S*|(?!\S*\.(sqsh|squashfs)$)\S+)\Z"),
    worded("an image such as nvcr.io#nvidia/pytorch:26.03-py3, of a file its absolute path,"),
]
# env would take it for a variable
Python = Annotated[str, Field(pattern="^[^=]+$"), worded("a program without = in its name")]
Variables = dict[Variable, str]


class Container(BaseModel):
    """`image`: of arms that `images` has not. `mounts`: beside what every run needs."""

    model_config = ConfigDict(extra="forbid", frozen=True, regex_engine="python-re")

    image: Image | None = None
    images: dict[Arm, Image] = {}
    mounts: tuple[Mount, ...] = ()

    def image_of(self, arm: Arm) -> str | None:
        return self.images.get(arm, self.image)

    def words(self, arm: Arm, folders: Iterable[Path]) -> list[str]:
        """Further options of srun. The site's mount of a folder replaces ours. `LaunchError` for a
        folder that pyxis cannot mount.
        """
        given = {mount.split(":")[0]: mount for mount in self.mounts}
        ours = [str(folder) for folder in folders]
        if wrong := [one for one in ours if re.search(r"[:,\s]", one)]:
            expected = "a folder without colon, comma and white space expected where a container is"
            raise LaunchError(f"{wrong[0]!r} given, {expected}")
        mounted = given | {one: one for one in ours if one not in given}
        mounts = ",".join(one if ":" in one else f"{one}:{one}" for one in mounted.values())
        image = str(self.image_of(arm))
        # a name, the same for arms of one image: doctor, preflight and ranks share the container
        name = f"flux_megatron-{hashlib.sha256(image.encode()).hexdigest()[:8]}-$SLURM_JOB_ID"
        options = {"image": image, "mounts": mounts, "name": name}
        return [f"--container-{key}={value}" for key, value in options.items()]


class Site(BaseModel):
    """`sbatch`, `srun`: their options, as `slurm_options` has them.

    `setup`: lines of bash that every node runs first, each with its own exit code; `environment`:
    variables of the Python, which win over ours.
    `silent_s`: a job whose ranks have written nothing for so long hangs. `retries`: how often a job
    queues up again in a row without a new checkpoint. `preflight`: nodes are examined first.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    python: Annotated[Python, Field(validate_default=True)] = sys.executable
    container: Container | None = None
    setup: tuple[str, ...] = ()
    environment: Variables = {}
    sbatch: OfSite = {}
    srun: OfSrun = {}
    silent_s: Annotated[int, Field(ge=1, strict=True)] = 1800
    retries: Annotated[int, Field(ge=0, strict=True)] = 2
    preflight: Annotated[bool, Field(strict=True)] = True

    def reach(self, arm: Arm, folders: Iterable[Path]) -> list[str]:
        """What srun is given to run something where the ranks of an arm run."""
        words = slurm_options.words(self.srun)
        return words + (self.container.words(arm, folders) if self.container else [])


def load(file: Path | None, sbatch: Iterable[str] = (), environment: Iterable[str] = ()) -> Site:
    """The site of a YAML file, with `KEY=VALUE` (or KEY) options upon it."""
    try:
        raw: dict[str, Any] = config_files.read(file) if file else {}
    except ValueError as error:
        raise LaunchError(f"{file}: {error}") from None
    if raw.get("container"):
        raw = {"python": "python3"} | raw  # ours is outside
    site = _checked(Site, raw, f"{file}:" if file else "without --site:")
    options = dict(_pair("--sbatch", text) for text in sbatch)
    variables = dict(_pair("--env", text) for text in environment)
    return site.model_copy(
        update={
            "sbatch": site.sbatch | _checked(OfSbatch, options, "--sbatch"),
            "environment": site.environment | _checked(Variables, variables, "--env"),
        }
    )


def _checked(kind: Any, given: Mapping[str, Any], source: str) -> Any:
    """What pydantic makes of it; `LaunchError` with all that is wrong."""
    try:
        return TypeAdapter(kind).validate_python(given)
    except ValidationError as error:
        raise LaunchError(f"{source} {schema.said(error)}") from None


def _pair(option: str, text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    key = key.strip().removeprefix("--")
    if not key or not (equals or option == "--sbatch"):
        raise LaunchError(f"{option} {text!r} given, KEY=VALUE expected")
    return key, value if equals else "true"

"""The container in which the ranks of an arm run: options of srun, or the command that starts it.

pyxis, Slurm's plugin for enroot, gives srun options of its own. Without it `enroot start` precedes
the command of every node. Both see the run's folder, the checkout and the data at their own paths.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

from flux_megatron.launch.workload import Arm

# of Slurm, which command.sh needs: `enroot start` clears the environment, pyxis keeps it
PASSED = (
    "SLURM_JOB_ID",
    "SLURM_JOB_NUM_NODES",
    "SLURM_NODEID",
    "SLURM_RESTART_COUNT",
    "SLURMD_NODENAME",
)
SQUASHED = (".sqsh", ".squashfs")


def _like(pattern: str, expected: str) -> AfterValidator:
    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"{text!r} given, {expected}")
        return text

    return AfterValidator(check)


MOUNT = "/HOST[:/CONTAINER[:FLAG+FLAG]] expected, such as /a:/b:ro"
Mount = Annotated[str, _like(r"/[^:,\s]*(:/[^:,\s]*(:[a-z+-]+)?)?", MOUNT)]
Folder = Annotated[str, _like("/.*", "an absolute path expected")]
# A squashfs file is looked for on the nodes, from whatever folder they start in.
Image = Annotated[
    str,
    _like(r"\S+", "an image such as nvcr.io#nvidia/pytorch:26.03-py3 expected"),
    _like(r"/.*|.*(?<!\.sqsh)(?<!\.squashfs)", "an absolute path expected"),
]


class Container(BaseModel):
    """`image`: of all arms, or None where `images` has one for each. `mounts`: beside what every
    run needs. `workdir`: where a container begins; the programs change to their own folder.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    runtime: Literal["pyxis", "enroot"] = "pyxis"
    image: Image | None = None
    images: dict[Arm, Image] = {}
    mounts: tuple[Mount, ...] = ()
    workdir: Folder | None = None

    @model_validator(mode="after")
    def _check_enroot(self) -> Container:
        """`enroot start` imports nothing."""
        for image in filter(None, (self.image, *self.images.values())):
            if self.runtime == "enroot" and "/" in image and not image.endswith(SQUASHED):
                raise ValueError(
                    f"{image!r} given, a squashfs file (.sqsh) or the name of a container expected:"
                    f" `enroot import --output /shared/image.sqsh docker://{image}` makes a file"
                )
        return self

    def image_of(self, arm: Arm) -> str | None:
        return self.images.get(arm, self.image)

    def words(self, arm: Arm, folders: Iterable[Path]) -> str:
        """For bash, between srun's options and the command of a node: further options of srun, or
        the command that starts the container.
        """
        image, mounts = str(self.image_of(arm)), self._mounts(folders)
        if self.runtime == "enroot":
            given = [f"--mount={_fstab(mount)}" for mount in mounts]
            passed = [text for name in PASSED for text in ("--env", name)]
            return shlex.join(["enroot", "start", "--rw", *passed, *given, image])
        options = [f"--container-image={image}"]
        options += [f"--container-mounts={','.join(map(_whole, mounts))}"]
        options += [f"--container-workdir={self.workdir}"] if self.workdir else []
        # a name, the same for arms of one image: doctor, preflight and ranks share the container
        name = hashlib.sha256(image.encode()).hexdigest()[:8]
        return f'{shlex.join(options)} --container-name=flux_megatron-{name}-"$SLURM_JOB_ID"'

    def _mounts(self, folders: Iterable[Path]) -> list[str]:
        """Each once; the site's mount of a folder replaces ours."""
        given = {mount.split(":")[0] for mount in self.mounts}
        needed = dict.fromkeys(str(folder) for folder in folders)
        return [*self.mounts, *(folder for folder in needed if folder not in given)]


def _whole(mount: str) -> str:
    """pyxis wants both sides."""
    return mount if ":" in mount else f"{mount}:{mount}"


def _fstab(mount: str) -> str:
    """enroot wants the fields of an fstab: both sides, a type, options."""
    source, target, *flags = _whole(mount).split(":")
    options = ",".join(["x-create=auto", "rbind", *(flags[0].split("+") if flags else [])])
    return f"{source}:{target}:none:{options}"

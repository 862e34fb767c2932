"""A clean environment for a wheel: a venv that sees, of what is installed here, what it may.

Nothing is downloaded. What the venv may see are links to the packages of this Python that the
given requirements need, with their metadata, so that pip itself decides whether they are enough.
"""

from __future__ import annotations

import email
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


def build(out: Path, target: str, source: Path = ROOT) -> Path:
    """The `target`, wheel or sdist, of a source tree, by hatchling as it is installed here."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (file,) = out.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return file


def requirements(wheel: Path, extra: str = "") -> list[Requirement]:
    """What the wheel requires with one of its extras, or with none."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        message = email.message_from_bytes(archive.read(name))
    return _asked(message.get_all("Requires-Dist", []), {extra})


def needed(wanted: Iterable[Requirement]) -> dict[str, metadata.Distribution]:
    """The installed distributions that these requirements need, by name.

    What is not installed is left out: pip then complains about it.
    """
    found: dict[str, metadata.Distribution] = {}
    waiting, seen = list(wanted), set()
    while waiting:
        one = waiting.pop()
        if (key := (one.name.lower().replace("_", "-"), *sorted(one.extras))) in seen:
            continue
        seen.add(key)
        try:
            here = found[key[0]] = metadata.distribution(one.name)
        except metadata.PackageNotFoundError:
            continue
        waiting += _asked(here.requires or (), one.extras or {""})
    return found


def _asked(texts: Iterable[str], extras: set[str]) -> list[Requirement]:
    """Those of the requirements whose markers hold here, with these extras."""
    every = map(Requirement, texts)
    return [
        one for one in every
        if not one.marker or any(one.marker.evaluate({"extra": extra}) for extra in extras)
    ]  # fmt: skip


def link(packages: Iterable[metadata.Distribution], folder: Path) -> None:
    """Links in `folder` to all that these distributions have installed."""
    for package in packages:
        for name in {Path(file).parts[0] for file in package.files or ()}:
            target, source = folder / name, Path(str(package.locate_file(name)))
            if name not in ("..", "__pycache__") and source.exists() and not target.exists():
                target.symlink_to(source)


def environment(folder: Path, wheel: Path, extra: str = "") -> Path:
    """A venv with the wheel and one of its extras, or none; its folder of commands."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    (site,) = folder.glob("lib/python*/site-packages")
    link(needed(requirements(wheel, extra)).values(), site)
    commands = folder / "bin"
    command = [sys.executable, "-m", "pip", "--python", str(commands / "python"), "install"]
    command += ["--no-index", "--no-cache-dir", "--no-compile", "--disable-pip-version-check"]
    command += [f"flux-megatron[{extra}] @ {wheel.as_uri()}" if extra else str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return commands

"""Which packages a run needs, and which versions of them are here."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from flux_megatron import command_errors
from flux_megatron.doctor.finding import Finding, Status, Wanted, gpus_seen, untested
from flux_megatron.versions import megatron_core
from flux_megatron.versions.library import version_of
from flux_megatron.versions.megatron_core import MEGATRON_CORE
from flux_megatron.versions.python import PYTHON
from flux_megatron.versions.torch import TORCH
from flux_megatron.versions.transformer_engine import TRANSFORMER_ENGINE
from flux_megatron.versions.triton import TRITON

# apex builds this beside itself; the package `apex` on PyPI is another project
APEX = "fused_weight_gradient_mlp_cuda"
SCRIPT = "pretrain_gpt.py"
HELPER_NEEDS = ("make", "g++", "python3", "python3-config")
# how our layers come into each framework's models; docs/frameworks.md and pytorch.md have the rest
_BY_VARIABLE = "FLUX_MEGATRON_ENABLE=1 in its workers"
FRAMEWORKS = {
    "megatron-bridge": f"{_BY_VARIABLE}, or replace() in a pre-wrap hook",
    "verl": _BY_VARIABLE,
    "nemo-rl": _BY_VARIABLE,
    "torchtitan": "its operations in place of its own, by lines to paste",
    "transformers": "nn.in_transformers() before from_pretrained(tp_plan=...)",
}


def python(wanted: Wanted) -> Iterator[Finding]:
    version = platform.python_version()
    yield Finding("Python", "ok", f"{version}, {sys.executable}")
    yield from untested(PYTHON, version)


def torch(wanted: Wanted) -> Iterator[Finding]:
    if find_spec("torch") is None:
        yield Finding("torch", "missing", "not installed", "install the build for your driver")
        return
    try:
        import torch
    except Exception as error:  # its libraries, or those of the driver
        yield Finding("torch", "missing", f"cannot be imported: {error!r}", "reinstall it")
        return
    version = torch.__version__
    text = f"{version}, CUDA {torch.version.cuda or 'none'}"
    if TORCH.is_too_old(version):
        yield Finding("torch", "missing", text, f"{TORCH.oldest} or newer is needed")
    else:
        yield Finding("torch", "ok", text)
        yield from untested(TORCH, version)


def triton(wanted: Wanted) -> Iterator[Finding]:
    version = version_of("triton")
    if version is None:
        yield Finding("triton", "missing", "not installed", "pip install triton")
    elif TRITON.is_too_old(version):
        remedy = f"pip install 'triton>={TRITON.oldest}'"
        yield Finding("triton", "missing", version, remedy)
    else:
        yield Finding("triton", "ok", version)
        yield from untested(TRITON, version)
    if not gpus_seen():
        return
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler:
        yield Finding("compiler", "ok", f"{compiler}; nvcc is not needed")
    else:
        remedy = "Triton builds its launchers with gcc or clang; nvcc is not needed"
        yield Finding("compiler", "missing", "no C compiler on PATH", remedy)


def megatron(wanted: Wanted) -> Iterator[Finding]:
    from flux_megatron.integration import parser_signature

    releases = parser_signature.releases()
    known = [name.removeprefix("core_v") for name in releases if name.startswith("core_v")]
    if wanted.checkout is not None:
        subject, there = "Megatron-LM", (wanted.checkout / SCRIPT).is_file()
        version = megatron_core.version_in(wanted.checkout) if there else None
        text, remedy = f"{version} in {wanted.checkout}", "is the checkout on a shared file system?"
    else:
        subject, version = "megatron-core", version_of("megatron-core")
        text, remedy = str(version), "pip install 'flux-megatron[megatron]'"
    if version is None:
        yield Finding(subject, "missing", f"not in {wanted.checkout or 'this Python'}", remedy)
    elif MEGATRON_CORE.is_too_old(version):
        yield Finding(subject, "missing", f"{text} is too old", megatron_core.SUPPORTED)
    elif ".".join(version.split(".")[:2]) in {".".join(v.split(".")[:2]) for v in known}:
        yield Finding(subject, "ok", text)
    else:
        yield Finding(subject, "note", text, f"not tried; known: {', '.join(known)}")
    yield from untested(MEGATRON_CORE, version or "")


def megatron_imports(wanted: Wanted) -> Iterator[Finding]:
    """What pretrain_gpt.py of the checkout imports and this Python has not."""
    if (checkout := _usable(wanted)) is None or not (checkout / SCRIPT).is_file():
        return
    from flux_megatron.doctor import megatron_imports

    for name, file in megatron_imports.missing(checkout, SCRIPT).items():
        text = f"not installed, {file} of {checkout} imports it"
        yield Finding(name, "missing", text, f"pip install {name}")


def data_set_helper(wanted: Wanted) -> Iterator[Finding]:
    """Megatron compiles it at the first start, for the Python whose python3-config is on PATH:
    outside a virtual environment that may be another one's.
    """
    if (checkout := _usable(wanted)) is None:
        return
    folder = checkout / "megatron" / "core" / "datasets"
    if not folder.is_dir():
        return
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    if (folder / f"helpers_cpp{suffix}").is_file():
        yield Finding("data set helper", "ok", "compiled")
        return
    lacking = [name for name in HELPER_NEEDS if shutil.which(name) is None]
    if not lacking:
        built = _output(folder, "python3-config", "--extension-suffix")
        if built != suffix:
            lacking = [f"this Python's python3-config: that on PATH is of {built}"]
        elif not _output(folder, "python3", "-m", "pybind11", "--includes"):
            lacking = ["pybind11 of the python3 on PATH"]
    if not lacking:
        yield Finding("data set helper", "ok", "not compiled yet, Megatron does so at its start")
        return
    remedy = f"pip install -e {checkout} compiles it"
    if "g++" in lacking:
        remedy = f"install g++, then {remedy}"
    yield Finding("data set helper", "missing", f"no {', '.join(lacking)}", remedy)


def _usable(wanted: Wanted) -> Path | None:
    """The checkout, unless it is too old: what else such a one lacks does not matter."""
    version = megatron_core.version_in(wanted.checkout) if wanted.checkout else None
    return None if version and MEGATRON_CORE.is_too_old(version) else wanted.checkout


def _output(folder: Path, *command: str) -> str:
    """What a program writes in this folder, whose `.python-version` may choose another one; nothing
    of one that fails or does not come back.
    """
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout.strip()


def other_packages(wanted: Wanted) -> Iterator[Finding]:
    """What Megatron-LM's stock layers need, and what serves ours where it is there."""
    version = version_of("transformer-engine")
    if version is not None:
        yield Finding("TransformerEngine", "ok", version)
        yield from untested(TRANSFORMER_ENGINE, version)
    elif "transformer_engine" in wanted.packages:
        yield Finding("TransformerEngine", "missing", "not installed", "this arm is built of it")
    else:
        remedy = "attention is torch's; Megatron wants --no-masked-softmax-fusion --no-rope-fusion"
        yield Finding("TransformerEngine", "note", "not installed", remedy)
    if find_spec(APEX) is not None:
        yield Finding("apex", "ok", "fuses weight gradients")
    elif "apex" in wanted.packages:
        remedy = "build it, or launch with --set arguments=[--no-gradient-accumulation-fusion]"
        yield Finding("apex", "missing", f"no {APEX}, which Megatron's LM head wants", remedy)
    else:
        yield Finding("apex", "note", "not installed", "with --flux-overlap our kernel stands in")
    if wanted.checkout is None:
        from flux_megatron import lab_commands

        # `--save` and our own loop, of the laboratory, need what launches do without
        kinds: dict[str, Status] = {"launch": "missing"}
        if lab_commands.is_installed("train"):
            kinds["train"] = "note"
        for name, extra in command_errors.EXTRAS.items():
            if extra in kinds and find_spec(name) is None:
                remedy = f"pip install 'flux-megatron[{extra}]'"
                yield Finding(name, kinds[extra], "not installed", remedy)


def frameworks(wanted: Wanted) -> Iterator[Finding]:
    """Those that are here, and how a user switches us on there."""
    for name, how in FRAMEWORKS.items():
        if (version := version_of(name)) is not None:
            yield Finding(name, "ok", f"{version}; overlaps with {how}")

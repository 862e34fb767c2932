"""`flux-megatron doctor`: what this machine has of that which a training run needs.

Every probe is guarded: where one fails, the others still speak. It works without torch, and says
that it is missing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from flux_megatron.command_errors import Parser
from flux_megatron.versions.library import Library
from flux_megatron.versions.megatron_core import MEGATRON_CORE
from flux_megatron.versions.python import PYTHON
from flux_megatron.versions.torch import TORCH
from flux_megatron.versions.transformer_engine import TRANSFORMER_ENGINE
from flux_megatron.versions.triton import TRITON

COLOURS = {"ok": 32, "note": 33, "missing": 31}  # of a terminal: green, yellow, red
# apex builds this beside itself; the package `apex` on PyPI is another project
APEX = "fused_weight_gradient_mlp_cuda"
PACKAGES = ("transformer_engine", "apex")


@dataclass(frozen=True)
class Finding:
    """`missing` keeps a training run from starting, a `note` does not; `remedy` is what to do."""

    subject: str
    status: Literal["ok", "note", "missing"]
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Wanted:
    """What a run on this machine is to have; `gpus` None: what there is, 0: the CPU."""

    gpus: int | None = None
    checkout: Path | None = None
    packages: tuple[str, ...] = ()


def parser() -> Parser:
    """Python's own: this command runs where only the core is installed."""
    parser = Parser(
        prog="flux-megatron doctor", allow_abbrev=False,
        description="Say what this machine has of what a training run needs; "
        "fails if none could start.",
    )  # fmt: skip
    add = parser.add_argument
    add("--gpus", type=_count, help="GPUs that this node must have; 0: it runs on the CPU")
    add("--megatron-lm", type=Path, metavar="DIR", help="The checkout that is to run")
    add("--need", action="append", default=[], choices=PACKAGES, help="Must be there")
    add("--quiet", action="store_true", help="Only what is missing")
    add("--json", action="store_true", help="For programs")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} given, a number of GPUs from 0 on expected")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    given = parser().parse_args(arguments)
    findings = []
    for finding in examine(Wanted(given.gpus, given.megatron_lm, tuple(given.need))):
        findings.append(finding)
        if not given.json and (finding.status == "missing" or not given.quiet):
            print(_line(finding), flush=True)
    missing = [finding for finding in findings if finding.status == "missing"]
    if given.json:
        shown = missing if given.quiet else findings
        print(json.dumps([dataclasses.asdict(finding) for finding in shown], indent=2))
    return 1 if missing else 0


def examine(wanted: Wanted) -> Iterator[Finding]:
    """The findings of all probes, in the order in which one would repair."""
    for probe in PROBES:
        try:
            yield from probe(wanted)
        except Exception as error:  # noqa: PERF203, the other probes are to speak
            subject = probe.__name__.strip("_").replace("_", " ")
            yield Finding(subject, "note", f"not examined: {error!r}")


def _line(finding: Finding) -> str:
    status = f"{finding.status:8}"
    if sys.stdout.isatty():
        status = f"\033[{COLOURS[finding.status]}m{status}\033[0m"
    remedy = f"; {finding.remedy}" if finding.remedy else ""
    return f"{status}{finding.subject:22}{finding.text}{remedy}"


def _python(wanted: Wanted) -> Iterator[Finding]:
    version = platform.python_version()
    yield Finding("Python", "ok", f"{version}, {sys.executable}")
    yield from _untested(PYTHON, version)


def _torch(wanted: Wanted) -> Iterator[Finding]:
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
        yield from _untested(TORCH, version)


def _triton(wanted: Wanted) -> Iterator[Finding]:
    version = _version("triton")
    if version is None:
        yield Finding("triton", "missing", "not installed", "pip install triton")
    elif TRITON.is_too_old(version):
        remedy = f"pip install 'triton>={TRITON.oldest}'"
        yield Finding("triton", "missing", version, remedy)
    else:
        yield Finding("triton", "ok", version)
        yield from _untested(TRITON, version)
    if not _gpus_seen():
        return
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler:
        yield Finding("compiler", "ok", f"{compiler}; nvcc is not needed")
    else:
        remedy = "Triton builds its launchers with gcc or clang; nvcc is not needed"
        yield Finding("compiler", "missing", "no C compiler on PATH", remedy)


def _gpus(wanted: Wanted) -> Iterator[Finding]:
    if find_spec("torch") is None or wanted.gpus == 0:
        return
    import torch

    names = [torch.cuda.get_device_name(i) for i in range(_gpus_seen())]
    text = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none"
    if wanted.gpus is not None and len(names) < wanted.gpus:
        remedy = "look at nvidia-smi, CUDA_VISIBLE_DEVICES and what Slurm was asked for"
        yield Finding("GPUs", "missing", f"{text}; {wanted.gpus} expected", remedy)
    elif not names:
        yield Finding("GPUs", "note", text, "kernels are interpreted on the CPU: for small trials")
    else:
        yield Finding("GPUs", "ok" if len(set(names)) == 1 else "note", text)
    if len(names) > 1:
        yield from _links(len(names))


def _links(count: int) -> Iterator[Finding]:
    import torch

    from flux_megatron.tuning import environment

    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    closed = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if closed:
        text = f"not between {', '.join(f'{i} and {j}' for i, j in closed if i < j)}"
        remedy = "calls run on NCCL, without overlap; look at nvidia-smi topo -p2p r"
        yield Finding("peer access", "note", text, remedy)
    else:
        yield Finding("peer access", "ok", f"between all {count} GPUs")
    yield Finding("link", "ok", environment.of(torch.device("cuda", 0)).link)
    import torch.distributed._symmetric_memory as symmetric_memory

    symmetric_memory.empty(1 << 21, dtype=torch.uint8, device=torch.device("cuda", 0))
    yield Finding("symmetric memory", "ok", "torch allocates it")


def _shared_memory(wanted: Wanted) -> Iterator[Finding]:
    """On the CPU ranks open each other's memory through /proc."""
    if wanted.gpus or (wanted.gpus is None and _gpus_seen()):
        return
    descriptor = os.memfd_create("flux_megatron_doctor")
    try:
        file = f"/proc/{os.getpid()}/fd/{descriptor}"
        opened = subprocess.run(["sh", "-c", f": <{file}"], capture_output=True, timeout=30)
    finally:
        os.close(descriptor)
    if opened.returncode == 0:
        yield Finding("shared memory", "ok", "processes open each other's memory files")
    else:
        text = opened.stderr.decode().strip()
        remedy = "run all ranks as one user, in one container"
        yield Finding("shared memory", "missing", text, remedy)


def _megatron(wanted: Wanted) -> Iterator[Finding]:
    from flux_megatron.launch import parser_signature

    releases = parser_signature.releases()
    known = [name.removeprefix("core_v") for name in releases if name.startswith("core_v")]
    if wanted.checkout is not None:
        subject, there = "Megatron-LM", (wanted.checkout / "pretrain_gpt.py").is_file()
        version = parser_signature.version(wanted.checkout) if there else None
        text, remedy = f"{version} in {wanted.checkout}", "is the checkout on a shared file system?"
    else:
        subject, version = "megatron-core", _version("megatron-core")
        text, remedy = str(version), "pip install 'flux-megatron[megatron]'"
    if version is None:
        yield Finding(subject, "missing", f"not in {wanted.checkout or 'this Python'}", remedy)
    elif ".".join(version.split(".")[:2]) in {".".join(v.split(".")[:2]) for v in known}:
        yield Finding(subject, "ok", text)
    else:
        yield Finding(subject, "note", text, f"not tried; known: {', '.join(known)}")
    yield from _untested(MEGATRON_CORE, version or "")


def _megatron_imports(wanted: Wanted) -> Iterator[Finding]:
    """What pretrain_gpt.py of the checkout imports and this Python has not."""
    if wanted.checkout is None or not (wanted.checkout / "pretrain_gpt.py").is_file():
        return
    from flux_megatron.launch import megatron_imports

    for name, file in megatron_imports.missing(wanted.checkout).items():
        text = f"not installed, {file} of {wanted.checkout} imports it"
        yield Finding(name, "missing", text, f"pip install {name}")


def _variables(wanted: Wanted) -> Iterator[Finding]:
    from flux_megatron import settings

    for line in settings.unknown(os.environ).values():
        yield Finding("variable", "note", line)
    try:
        settings.read(os.environ)
    except ValueError as error:
        yield Finding("variable", "missing", str(error), "unset it, or give it such a value")


def _data_set_helper(wanted: Wanted) -> Iterator[Finding]:
    """Megatron compiles it at the first start, for the Python whose python3-config is on PATH:
    outside a virtual environment that may be another one's.
    """
    folder = wanted.checkout and wanted.checkout / "megatron" / "core" / "datasets"
    if folder is None or not folder.is_dir():
        return
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    if (folder / f"helpers_cpp{suffix}").is_file():
        yield Finding("data set helper", "ok", "compiled")
        return
    lacking = [name for name in ("make", "g++", "python3-config") if shutil.which(name) is None]
    if not lacking:
        command = ["python3-config", "--extension-suffix"]
        built = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()
        if built != suffix:
            lacking = [f"this Python's python3-config: that on PATH is of {built}"]
    if not lacking:
        yield Finding("data set helper", "ok", "not compiled yet, Megatron does so at its start")
        return
    remedy = f"pip install -e {wanted.checkout} compiles it"
    yield Finding("data set helper", "missing", f"no {', '.join(lacking)}", remedy)


def _other_packages(wanted: Wanted) -> Iterator[Finding]:
    """What Megatron-LM's stock layers need, and what serves ours where it is there."""
    version = _version("transformer-engine")
    if version is not None:
        yield Finding("TransformerEngine", "ok", version)
        yield from _untested(TRANSFORMER_ENGINE, version)
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
        for name in ("numpy", "psutil", "pydantic", "yaml", "rich", "matplotlib", "typer"):
            if find_spec(name) is None:
                yield Finding(
                    name, "missing", "not installed", "pip install 'flux-megatron[train]'"
                )


def _connections(wanted: Wanted) -> Iterator[Finding]:
    if not _gpus_seen():
        return
    given = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "unset")
    remedy = "" if given == "1" else "export 1: Megatron demands it up to Hopper"
    yield Finding("CUDA connections", "note" if remedy else "ok", given, remedy)


def _driver_calls(wanted: Wanted) -> Iterator[Finding]:
    """Who makes those of a repeated call."""
    if not _gpus_seen():
        return
    from flux_megatron import settings
    from flux_megatron.symm import native_engine

    if settings.get().native == "0":
        yield Finding("driver calls", "ok", "Python makes them: FLUX_MEGATRON_NATIVE=0")
    elif reason := native_engine.unavailable():
        yield Finding("driver calls", "note", f"Python makes them, one at a time: {reason}")
    else:
        yield Finding("driver calls", "ok", "C makes them all at once")


def _plans(wanted: Wanted) -> Iterator[Finding]:
    if not _gpus_seen():
        return
    import torch

    from flux_megatron import settings
    from flux_megatron.tuning import choice

    cache = choice.opened(settings.get().cache, torch.device("cuda", 0))
    fitting = sum(map(cache.is_here, cache.entries))
    text = f"{len(cache.entries)} of this GPU, {fitting} of just this software"
    remedy = "" if fitting else "the nearest or the cost model choose; flux-megatron tune measures"
    yield Finding("measured plans", "note" if remedy else "ok", text, remedy)


def _kernels(wanted: Wanted) -> Iterator[Finding]:
    """Which kernels `hopper` and `signalled` will run, and by what bands are chosen."""
    if not _gpus_seen():
        return
    import torch

    from flux_megatron.kernels import hopper_config, hopper_gemm
    from flux_megatron.perf import hardware
    from flux_megatron.tuning import environment

    reason = hopper_gemm.refuses_bands("cuda", torch.bfloat16, 64, 64, 1, (), hopper_config.TILE)
    text = f"the portable ones run: {reason}" if reason else "run in 16 bits, at aligned sizes"
    yield Finding("Hopper kernels", "note" if reason else "ok", text)
    where = environment.of(torch.device("cuda", 0))
    facts = hardware.find_or_assume(where.gpu, where.link)
    source = f"chosen by the curves of {facts.name}, {facts.source}" if facts else "of equal size"
    assumed = facts is None or "assumed" in facts.source
    yield Finding("bands of signalled", "note" if assumed else "ok", source)


def _untested(library: Library, version: str) -> Iterator[Finding]:
    if text := library.untested(version):
        subject = f"version of {library.distribution}"
        yield Finding(subject, "note", text, "run the tests before a long job")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _gpus_seen() -> int:
    if find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count()


PROBES: tuple[Callable[[Wanted], Any], ...] = (
    _python, _torch, _triton, _gpus, _shared_memory, _megatron, _megatron_imports,
    _data_set_helper, _variables, _other_packages, _connections, _kernels, _driver_calls,
    _plans,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())

"""The wheel and the sdist of this checkout, installed into clean environments, far from any
checkout: what is in them, what runs with the core alone, what the commands find with their extras.

Nothing is downloaded: of what is installed here a venv sees links to the packages that the given
requirements need, with their metadata. So it cannot tell whether an index has the requirements;
that pip takes those installed here for enough, it does.
"""

import email
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="builds the wheel: pip install -e '.[dev]'")

import typer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from flux_megatron import command_errors, lab_commands
from flux_megatron.cli import app
from flux_megatron.version import __version__

ROOT = Path(__file__).parents[1]


def build(out: Path, target: str, source: Path = ROOT) -> Path:
    """The `target`, wheel or sdist, of a source tree, by hatchling as it is installed here."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
    subprocess.run(command, cwd=source, check=True, timeout=120)
    (file,) = out.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return file


def requirements(wheel: Path, extra: str = "") -> list[Requirement]:
    """What the wheel requires with one of its extras, or with none."""
    name = f"flux_megatron-{__version__}.dist-info/METADATA"
    message = email.message_from_bytes(zipfile.ZipFile(wheel).read(name))
    return _asked(message.get_all("Requires-Dist", []), {extra})


def needed(wanted: Iterable[Requirement]) -> dict[str, metadata.Distribution]:
    """The installed distributions that these requirements need, by name.

    What is not installed is left out: pip then complains about it.
    """
    found: dict[str, metadata.Distribution] = {}
    waiting, seen = list(wanted), set()
    while waiting:
        one = waiting.pop()
        if (key := (canonicalize_name(one.name), *sorted(one.extras))) in seen:
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
    return [
        one for one in map(Requirement, texts)
        if not one.marker or any(one.marker.evaluate({"extra": extra}) for extra in extras)
    ]  # fmt: skip


def link(packages: Iterable[metadata.Distribution], folder: Path) -> None:
    for package in packages:
        for name in {Path(file).parts[0] for file in package.files or ()}:
            target, source = folder / name, Path(str(package.locate_file(name)))
            if name not in ("..", "__pycache__") and source.exists() and not target.exists():
                target.symlink_to(source)


def environment(folder: Path, wheel: Path) -> Path:
    """A venv with the wheel and what it requires without extras; its folder of commands."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    (site,) = folder.glob("lib/python*/site-packages")
    link(needed(requirements(wheel)).values(), site)
    options = ["--no-index", "--no-cache-dir", "--no-compile", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "--python", folder / "bin/python", "install"]
    subprocess.run([*command, *options, wheel], check=True, timeout=120)
    return folder / "bin"


EMPTY = {"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}
CALL = """
import sys
import time
begun_s = time.process_time()
import flux_megatron
assert time.process_time() - begun_s < 0.3
assert not {"torch", "triton"} & sys.modules.keys(), "the package itself loads neither"
import torch
import torch.distributed as dist
rank, store = int(sys.argv[1]), f"file://{sys.argv[2]}"
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
x, w = torch.full((1, 4), rank + 1.0), torch.ones(3, 4)
assert flux_megatron.all_gather_gemm(x, w, dist.group.WORLD).tolist() == [[4.0] * 3, [8.0] * 3]
print(flux_megatron.report())
dist.destroy_process_group()
"""

# Every module of the package; of another package any may be missing.
IMPORT_ALL = """
import importlib, pkgutil, flux_megatron, flux_megatron.nn, flux_megatron.integration
names = [one.name for one in pkgutil.walk_packages(flux_megatron.__path__, "flux_megatron.")]
for name in names:
    try:
        if not name.endswith("__main__"):
            importlib.import_module(name)
    except ModuleNotFoundError as error:
        assert error.name.split(".")[0] != "flux_megatron", (name, error)
print(len(names))
"""
PRODUCT = ("run", "launch", "doctor", "patch", "tune")  # its commands


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build(tmp_path_factory.mktemp("dist"), "wheel")


@pytest.fixture(scope="module")
def core(wheel, tmp_path_factory):
    return environment(tmp_path_factory.mktemp("core") / "venv", wheel)


@pytest.fixture(scope="module")
def extra(wheel, tmp_path_factory):
    """What the extra `launch` brings, for PYTHONPATH: it is what most commands need."""
    folder = tmp_path_factory.mktemp("extra")
    link(needed(requirements(wheel, "launch")).values(), folder)
    return str(folder)


def ran(folder: Path, *command: object, path: str = "", code: int = 0, **more: str) -> str:
    """Stdout, or stderr for status 2, of a command that sees its venv and `path` alone."""
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env=EMPTY | {"PYTHONPATH": path} | more,
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr if code == 2 else done.stdout


def test_the_wheel_has_what_the_commands_read(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert sorted(names) == sorted(set(names))
    assert not [name for name in names if name.startswith("flux_megatron/lab/")]
    for folder in ("configs", "patches"):
        files = [file for file in (ROOT / folder).rglob("*") if file.is_file()]
        assert {f"flux_megatron/{file.relative_to(ROOT)}" for file in files} <= {*names}
    assert "flux_megatron/py.typed" in names
    assert f"flux_megatron-{__version__}.dist-info/licenses/LICENSE" in names
    tops = {name.split("/")[0] for name in names}
    assert tops == {"flux_megatron", f"flux_megatron-{__version__}.dist-info"}


def test_the_core_is_torch_and_triton_and_a_missing_module_leads_to_the_extra_that_brings_it(wheel):
    """The table of `command_errors` is that of pyproject.toml, and every extra has typer."""
    assert {one.name for one in requirements(wheel)} == {"torch", "triton"}
    distributions = {"megatron": "megatron-core", "pynvml": "nvidia-ml-py", "yaml": "pyyaml"}
    for module, extra in command_errors.EXTRAS.items():
        name = distributions.get(module, module)
        assert name in {one.name for one in requirements(wheel, extra)}, (module, extra)
    for command, extra in command_errors.EXTRA_OF_COMMAND.items():
        line = f"flux-megatron {command}: typer is not installed: "
        assert command_errors.missing("typer", command) == (
            f"{line}pip install 'flux-megatron[{extra}]'"
        )
        brought = {one.name for one in requirements(wheel, extra)}
        assert {one.name for one in requirements(wheel, "launch")} <= brought


def test_the_core_alone_has_doctor(core, tmp_path):
    assert ran(tmp_path, core / "flux-megatron", "--version") == f"{__version__}\n"
    assert "torch" in ran(tmp_path, core / "flux-megatron", "doctor", "--gpus", "0", code=1)
    shown = ran(tmp_path, core / "python", "-m", "flux_megatron", "--help")
    assert "doctor" in shown
    assert "pip install 'flux-megatron[launch]'" in shown
    for command, brings in (("tune", "launch"), ("run", "megatron")):
        line = f"flux-megatron {command}: typer is not installed: "
        line += f"pip install 'flux-megatron[{brings}]'\n"
        assert ran(tmp_path, core / "flux-megatron", command, "--help", code=2) == line


@pytest.mark.parametrize("asked", [{}, {"TRITON_INTERPRET": "1"}], ids=["", "interpreted"])
def test_the_core_alone_computes_on_the_cpu(core, tmp_path, asked):
    """Without overlap, as numpy, in which Triton's interpreter is written, is no requirement."""
    python, store = (core / "python", "-W", "ignore", "-c", CALL), tmp_path / "store"
    with ThreadPoolExecutor() as pool:
        ranks = [pool.submit(ran, tmp_path, *python, rank, store, **asked) for rank in range(2)]
    assert all("CPU tensors need numpy" in rank.result() for rank in ranks)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        *((f"{command} --help", "sage: ") for command in PRODUCT),
        ("launch cpu/tiny --dry-run", "torch.distributed.run"),
        ("doctor --strategies", "ag_gemm"),
        ("tune --device cpu --hidden 16 --ffn 16 --heads 2 --M 16", "6 plans kept"),
    ],
)
def test_commands_work_outside_a_checkout(core, extra, tmp_path, words, text):
    cache = str(tmp_path / "cache")
    command = [core / "flux-megatron", *words.split()]
    assert text in ran(tmp_path, *command, path=extra, FLUX_MEGATRON_CACHE=cache)


def test_help_lists_what_is_installed(core, extra, tmp_path):
    said = ran(tmp_path, core / "flux-megatron", "--help", path=extra)
    assert "Tensor-parallel layers for Megatron" in said
    words = {*said.split()}
    assert {*PRODUCT} <= words
    assert not {*lab_commands.PLACES} & words


@pytest.mark.parametrize(("command", "of"), [("train", "train"), ("bench", "lab")])
@pytest.mark.parametrize("typer", [True, False], ids=["", "no typer"])
def test_a_command_of_the_laboratory_says_that_it_is_not_installed(
    core, extra, tmp_path, command, of, typer
):
    path = extra if typer else ""
    assert ran(tmp_path, core / "flux-megatron", command, "--help", path=path, code=2) == (
        f"flux-megatron {command}: flux_megatron.lab, which has this command, is not installed: "
        f"in a checkout of flux_megatron, pip install -e '.[{of}]'\n"
    )


def test_what_stands_in_for_a_gpu_is_of_the_laboratory(core, tmp_path):
    (tmp_path / "megatron/training").mkdir(parents=True)
    (tmp_path / "script.py").touch()
    rank = [core / "python", "-m", "flux_megatron.launch", "--device", "cpu", "script.py"]
    said = ran(tmp_path, *rank, code=2)
    assert said.startswith("flux-megatron run --device cpu: flux_megatron.lab, which has this")


def test_every_command_of_the_laboratory_is_where_it_is_said_to_be():
    for command in lab_commands.PLACES:
        assert lab_commands.is_installed(command)
        assert lab_commands.load(command)


def test_every_module_of_the_product_can_be_imported(core, tmp_path):
    """By whoever has all that is installed here; an operation has its help."""
    python, here = (core / "python", "-W", "ignore", "-c"), str(Path(pytest.__file__).parents[1])
    assert int(ran(tmp_path, *python, IMPORT_ALL, path=here).splitlines()[-1]) > 150
    help_of = "import flux_megatron; help(flux_megatron.gemm_reduce_scatter)"
    assert "gemm_reduce_scatter(" in ran(tmp_path, *python, help_of)


def test_the_sdist_makes_the_same_wheel(wheel, tmp_path):
    """What a distributor needs: sources, tests, and the pages and scripts that tests read."""
    with tarfile.open(build(tmp_path, "sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    source = tmp_path / f"flux_megatron-{__version__}"
    if (ROOT / ".git").exists():
        tracked = subprocess.run(
            ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.splitlines()
        assert [name for name in tracked if not (source / name).exists()] == []
    wheels = (wheel, build(tmp_path / "again", "wheel", source))
    one, other = ({i.filename: i.CRC for i in zipfile.ZipFile(w).infolist()} for w in wheels)
    assert one == other


def test_every_file_of_a_release_has_the_version():
    release = rf"^## {re.escape(__version__)} \(\d{{4}}-\d\d-\d\d\)$"
    assert re.search(release, (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"flux_megatron-{__version__}-py3" in (ROOT / "docs/install.md").read_text()


@pytest.mark.parametrize("page", ["README.md", "docs/install.md"])
def test_the_pages_of_a_beginner_name_commands_and_files_that_exist(page):
    text = (ROOT / page).read_text()
    known = typer.main.get_command(app).commands
    assert {*re.findall(r"flux-megatron ([a-z]+)", text)} <= known.keys()
    for script in re.findall(r"scripts/[\w.]+", text):
        assert (ROOT / script).exists()
    blocks = "".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL))
    assert "git clone" not in blocks, "of an address that nobody can know"

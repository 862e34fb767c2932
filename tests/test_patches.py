"""`patches/` and `flux-megatron patch`: on checkouts made up here, and on real ones where named.

FLUX_MEGATRON_LM names a checkout of Megatron-LM, FLUX_MEGATRON_LM_FOLDER a folder of several; they
are copied. Their own imports must be installed (0.14 to 0.16: six, regex, sentencepiece, tiktoken).
"""

import ast
import errno
import os
import re
import shutil
import sys
import textwrap
import types
from pathlib import Path

import pytest
from started import python
from typer.testing import CliRunner

from flux_megatron.cli import app
from flux_megatron.patching import checkout as checkouts
from flux_megatron.patching import series as all_series
from flux_megatron.patching.checkout import Refused
from flux_megatron.patching.fingerprints import RELIED_ON, functions

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
from record_release import record_functions

ARGUMENTS = "megatron/training/arguments.py"
LAYERS = "megatron/core/tensor_parallel/layers.py"
VERSION = "megatron/core/package_info.py"
RECORDED = all_series.supported()
INSERTED = [hunk.lines for hunk in all_series.hunks()]

BETWEEN = "\n" * 9  # the patch counts the lines of Megatron's function
# the shape of Megatron's, and names that patches and fingerprints look for
SOURCES = {
    VERSION: "MAJOR = 7\nMINOR = 3\nPATCH = 2\n",
    ARGUMENTS: f"""\
        import argparse

        def add_megatron_arguments(parser):
            parser.add_argument("--width", type=int)
            return parser

        def parse_args(words=None):
            parser = argparse.ArgumentParser(
                allow_abbrev=False,
            )

            parser = add_megatron_arguments(parser)
{BETWEEN}            args = parser.parse_args(words)

            return args

        def validate_args(args):
            pass
        """,
    LAYERS: """\
        class ColumnParallelLinear:
            def forward(self, x):
                return x
        """,
}
BEFORE = ("    parser = add_megatron_arguments(parser)", "    args = parser.parse_args(words)")
AFTER = {line: "\n".join([line, *ours]) for line, ours in zip(BEFORE, INSERTED, strict=True)}


@pytest.fixture
def patches(tmp_path, monkeypatch):
    """A folder of our patch, and of no version yet, in place of ours."""
    folder = tmp_path / "patches"
    folder.mkdir()
    shutil.copy(all_series.FOLDER / all_series.PATCH, folder)
    monkeypatch.setattr(all_series, "FOLDER", folder)
    return folder


@pytest.fixture
def checkout(tmp_path, patches):
    folder = tmp_path / "here" / "Megatron-LM"
    for path, source in SOURCES.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(textwrap.dedent(source))
    record_functions(folder, "core_v7.3.2")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    files = (file for file in folder.rglob("*") if file.is_file() and ".git" not in file.parts)
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def edit(checkout: Path, path: str, old: str, new: str) -> None:
    text = (checkout / path).read_text()
    assert old in text
    (checkout / path).write_text(text.replace(old, new))


def test_every_supported_version_is_recorded():
    assert [one.folder.name for one in RECORDED] == [
        "core_v0.14.0", "core_v0.15.3", "core_v0.16.1", "core_v0.17.1", "core_v0.18.2",
        "core_v0.19.0", "core_v0.19.2", "main-d98e8a64",
    ]  # fmt: skip
    assert [one.version for one in RECORDED] == sorted({one.version for one in RECORDED})


def test_a_copy_of_the_package_alone_says_what_it_lacks(monkeypatch, tmp_path):
    monkeypatch.setattr(all_series, "FOLDER", tmp_path / "patches")
    with pytest.raises(FileNotFoundError, match=r"has no VERSION/fingerprints\.json"):
        all_series.supported()


def test_the_patch_only_inserts_our_lines_into_recorded_functions():
    for hunk in all_series.hunks():
        ast.parse(textwrap.dedent(hunk.text))
        assert all(hunk.function in series.hashes[hunk.path] for series in RECORDED)
    why, _, _ = (all_series.FOLDER / all_series.PATCH).read_text().partition("--- a/")
    assert len(why.splitlines()) > 2


@pytest.mark.parametrize("series", RECORDED, ids=lambda series: series.folder.name)
def test_recorded_fingerprints_are_of_what_we_rely_on(series):
    layers = {f"{kind}ParallelLinear.forward" for kind in ("Column", "Row")}
    assert layers <= series.hashes[LAYERS].keys()
    assert RELIED_ON.keys() | {ARGUMENTS} == series.hashes.keys()
    hashes = [sha256 for found in series.hashes.values() for sha256 in found.values()]
    assert all(re.fullmatch("[0-9a-f]{64}", sha256) for sha256 in hashes)


@pytest.mark.parametrize(
    "line", ["-import argparse", " import argparse", "@@ -3,0 +4 @@", "@@ -3 +3,2 @@ f"]
)
def test_a_patch_with_text_of_others_is_an_error(patches, line):
    with (patches / all_series.PATCH).open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(ValueError, match=re.escape(line)):
        all_series.hunks()


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_apply_inserts_and_undo_restores_every_byte(checkout, ends):
    for path in SOURCES:
        (checkout / path).write_text((checkout / path).read_text(), newline=ends)
    before = contents(checkout)
    checkouts.apply(checkout)
    after = (checkout / ARGUMENTS).read_text()
    assert all(lines in after for lines in AFTER.values())
    assert [path for path, data in contents(checkout).items() if data != before[path]] == [
        ARGUMENTS
    ]
    checkouts.undo(checkout)
    assert contents(checkout) == before


def test_a_full_disk_leaves_what_was_there(checkout, monkeypatch):
    before = contents(checkout)

    def half(file: Path, data: bytes) -> None:
        with file.open("wb") as stream:
            stream.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(Refused, match="No space left on device"):
        checkouts.apply(checkout)
    assert contents(checkout) == before


def test_hunks_follow_a_function_that_moved(checkout):
    expected = (checkout / ARGUMENTS).read_text()
    edit(checkout, ARGUMENTS, "import argparse\n", "import argparse\nimport os\n\n\n")
    edit(checkout, ARGUMENTS, "return parser\n", "print(os.name)\n    return parser\n")
    before = contents(checkout)
    checkouts.apply(checkout)
    after = (checkout / ARGUMENTS).read_text()
    for line, lines in AFTER.items():
        expected = expected.replace(line, lines)
    assert after.endswith(expected[expected.index("def parse_args") :])
    edit(checkout, ARGUMENTS, "import os\n", "import os\n\n")
    checkouts.undo(checkout)
    edit(checkout, ARGUMENTS, "import os\n\n", "import os\n")
    assert contents(checkout) == before


TOUCHED = (ARGUMENTS, "allow_abbrev=False", "allow_abbrev=True")
CHANGED, RENAMED = (LAYERS, "return x", "return -x"), (LAYERS, "forward", "backward")
OLDER, NEWER = ((VERSION, "MINOR = 3", f"MINOR = {minor}") for minor in (2, 4))
OF_3, FORWARD = "7.3.2 in .* core_v7.3.2 .*", "ColumnParallelLinear.forward"


@pytest.mark.parametrize(
    ("edits", "said"),
    [
        ([TOUCHED], f"{OF_3}\n  {ARGUMENTS}: parse_args has another"),
        ([CHANGED], f"{OF_3}\n  {LAYERS}: {FORWARD} has another"),
        ([RENAMED], f"{OF_3}\n  {LAYERS}: {FORWARD} is missing"),
        ([NEWER, CHANGED], rf"7.4.2 found, one of 7.3.2 \(core_v7.3.2\) expected.*\n.*{FORWARD}"),
    ],
)
def test_a_changed_function_is_refused_by_name(checkout, edits, said):
    for one in edits:
        edit(checkout, *one)
    before = contents(checkout)
    with pytest.raises(Refused, match=said) as refusal:
        checkouts.apply(checkout)
    assert str(refusal.value).count("\n") == len(edits)
    assert contents(checkout) == before


def test_a_patch_release_in_which_nothing_that_we_rely_on_changed_is_taken(checkout):
    edit(checkout, VERSION, "PATCH = 2", "PATCH = 5")
    edit(checkout, ARGUMENTS, "pass", "assert args")
    assert not checkouts.examine(checkout).differences
    assert checkouts.apply(checkout).version == "7.3.5"


def test_the_closest_version_is_compared(checkout, patches):
    for one in (OLDER, CHANGED):
        edit(checkout, *one)
    record_functions(checkout, "core_v7.2.0")
    assert checkouts.examine(checkout).series.folder == patches / "core_v7.2.0"
    assert not checkouts.examine(checkout).differences


def test_half_applied_is_refused(checkout):
    checkouts.apply(checkout)
    edit(checkout, ARGUMENTS, "\n".join(INSERTED[1]) + "\n", "")
    for command in (checkouts.apply, checkouts.undo):
        with pytest.raises(Refused, match=f"only a part of the patches is applied, in {ARGUMENTS}"):
            command(checkout)


def test_undo_also_after_megatron_went_on(checkout):
    """Taking lines out needs no fingerprint: whoever updated a patched checkout can go back."""
    checkouts.apply(checkout)
    edit(checkout, LAYERS, "return x", "return -x")
    checkouts.undo(checkout)
    assert "flux" not in (checkout / ARGUMENTS).read_text()


def test_recording_what_is_patched_or_has_no_such_function_is_refused(checkout):
    checkouts.apply(checkout)
    with pytest.raises(Refused, match="patched already"):
        record_functions(checkout, "core_v7.3.2")
    checkouts.undo(checkout)
    edit(checkout, ARGUMENTS, "def parse_args", "def parse_all")
    with pytest.raises(Refused, match=f"{ARGUMENTS} has no function parse_args"):
        record_functions(checkout, "core_v7.3.2")


def test_a_decorator_belongs_to_its_function():
    plain = functions("def f():\n    pass\n")["f"]
    decorated = functions("@cache\ndef f():\n    pass\n")["f"]
    assert decorated.first == 1
    assert decorated.sha256 != plain.sha256


def test_the_commands(checkout):
    def run(command: str, status: int, text: str) -> None:
        done = CliRunner().invoke(app, ["patch", command, str(checkout)])
        assert (done.exit_code, text in done.output) == (status, True), done.output

    run("check", 0, "not applied")
    run("apply", 0, str(checkout / ARGUMENTS))
    before = contents(checkout)
    run("apply", 1, "already applied")
    assert contents(checkout) == before
    run("check", 0, "already applied")
    run("undo", 0, str(checkout / ARGUMENTS))
    run("undo", 1, "not applied")
    edit(checkout, LAYERS, "return x", "return -x")
    run("check", 1, "ColumnParallelLinear.forward")


@pytest.fixture
def parse(checkout, monkeypatch):
    """A patched checkout's `parse_args`, run as if these arguments came from a command line."""
    checkouts.apply(checkout)
    namespace: dict = {}
    exec((checkout / ARGUMENTS).read_text(), namespace)

    def parse(*words: str):
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *words])
        return namespace["parse_args"]()

    return parse


@pytest.fixture
def installed(monkeypatch):
    """What `install_from` was called with, of a package that stands in for ours."""

    def add_flux_arguments(parser):
        parser.add_argument("--flux-overlap", action="store_true")
        parser.add_argument("--flux-strategy")
        return parser

    calls: list = []
    flags = types.SimpleNamespace(add_flux_arguments=add_flux_arguments)
    install = types.SimpleNamespace(install_from=calls.append)
    for name, module in {"": flags, ".flags": flags, ".install": install}.items():
        monkeypatch.setitem(sys.modules, f"flux_megatron.integration{name}", module)
    return calls


def test_any_of_our_options_is_acted_on_and_without_them_nothing_is_installed(parse, installed):
    assert parse("--width", "3").width == 3
    assert not installed
    parsed = [parse(*words) for words in (["--flux-overlap"], ["--flux-strategy", "fused"])]
    assert installed == parsed


def test_without_the_package_a_patched_tree_is_a_stock_one(parse, monkeypatch, capsys):
    for module in ("flux_megatron.integration", "flux_megatron.integration.flags"):
        monkeypatch.setitem(sys.modules, module, None)
    assert vars(parse("--width", "3")) == {"width": 3}
    for words in (["--flux-overlap"], ["--flux-strategy", "fused", "--flux-overlap"]):
        with pytest.raises(SystemExit, match="2"):
            parse(*words)
        assert "need the package flux_megatron: " in capsys.readouterr().err


def real_checkouts() -> list[Path]:
    named, folder = (os.environ.get(f"FLUX_MEGATRON_LM{end}") for end in ("", "_FOLDER"))
    several = sorted(Path(folder).glob("*/megatron")) if folder else []
    return [*([Path(named)] if named else []), *(found.parent for found in several)]


PARSE = """
import sys, typing, typing_extensions
typing.override = typing_extensions.override  # used from 0.17 on, which is for Python >= 3.12
sys.argv = ["pretrain_gpt.py", *sys.argv[1:]]
from megatron.training.arguments import parse_args
parse_args()
from megatron.core.models.gpt import gpt_layer_specs
print("layers of", gpt_layer_specs.LocalSpecProvider.__module__)
"""


@pytest.mark.skipif(not real_checkouts(), reason="FLUX_MEGATRON_LM(_FOLDER) names no checkout")
@pytest.mark.parametrize("original", real_checkouts() or [Path("none")], ids=lambda path: path.name)
def test_a_real_checkout(original, tmp_path):
    checkout = tmp_path / "Megatron-LM"
    shutil.copytree(original / "megatron", checkout / "megatron")
    before = contents(checkout)
    checkouts.apply(checkout)
    path = os.pathsep.join([str(checkout), str(Path(__file__).parents[1])])
    options = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "TORCHDYNAMO_DISABLE": "1"}
    for words, layers in ((["--flux-overlap"], "flux_megatron"), ([], "megatron.core")):
        done = python("-c", PARSE, *words, folder=checkout, limit_s=140, **options)
        assert f"layers of {layers}" in done.stdout
    checkouts.undo(checkout)
    assert contents(checkout) == before

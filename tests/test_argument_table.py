"""`arguments.tsv` has the right verdict on each argument of each recorded Megatron-LM parser."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from flux_megatron.integration import arguments, seams
from flux_megatron.launch import experiment, megatron_arguments

TESTS = Path(__file__).parent
sys.path.append(str(TESTS.parent / "scripts"))

import argument_page  # noqa: E402

FEATURES = (TESTS / "integration" / "training_cases.py").read_text()
RELEASES = argument_page.options_by_release()
ROWS = (*arguments.table().values(), *seams.table().values())
SUPPORTED = sorted({row.because for row in ROWS if row.kind == "supported"})


@pytest.mark.parametrize("release", RELEASES)
def test_every_argument_of_a_recorded_parser_is_classified(release):
    assert not RELEASES[release] - arguments.table().keys()


def test_every_row_is_an_argument_of_some_recorded_parser():
    assert len(RELEASES) == 8
    assert not arguments.table().keys() - frozenset().union(*RELEASES.values())


def test_rows_are_in_order():
    assert [*arguments.table()] == sorted(arguments.table())


@pytest.mark.parametrize("test", SUPPORTED)
def test_what_is_supported_names_a_test_that_exists(test):
    assert exists(test)


def exists(test: str) -> bool:
    """The function in the file; and in brackets a feature of training_cases.py."""
    file, _, name = test.partition("::")
    name, _, feature = name.partition("[")
    if not (TESTS / file).is_file() or not name:
        return False
    nodes = ast.walk(ast.parse((TESTS / file).read_text()))
    functions = [node.name for node in nodes if isinstance(node, ast.FunctionDef)]
    return name in functions and (not feature or f'"{feature.rstrip("]")}": Feature(' in FEATURES)


@pytest.mark.parametrize("name", experiment.names())
def test_our_own_experiments_ask_for_nothing_that_is_refused(name):
    loaded = experiment.load(name)
    for arm, workload in loaded.arms.items():
        rendered = megatron_arguments.render(workload, data=["a"], save=Path("/c"), save_interval=1)
        options = {o for o in rendered if o.startswith("--") and not o.startswith("--flux-")}
        kinds = {arguments.table()[option].kind for option in options}
        assert arm != "flux" or kinds == {"harmless", "supported"}


@pytest.mark.parametrize(
    ("table", "columns", "first", "line"),
    [
        *((arguments, "option", "--seed", line) for line in
          ("--new\tharmless", "--new\tfine\tdata", "--seed\tharmless\tdata")),
        *((seams, "seam\tname", "config\tfp8", line) for line in
          ("config\ta\tharmless", "config\tb\tfine\tdata", "config\tfp8\trefused\tno")),
    ],
)  # fmt: skip
def test_a_line_that_is_no_row_is_reported(tmp_path, monkeypatch, table, columns, first, line):
    file = tmp_path / "rows.tsv"
    file.write_text(f"{columns}\tclass\tbecause\n{first}\tharmless\tdata\n{line}\n")
    monkeypatch.setattr(table, "FILE", file)
    with pytest.raises(ValueError, match=rf"rows\.tsv: '{line.split()[0]}"):
        table.table.__wrapped__()


def test_the_page_is_that_of_the_table():
    assert argument_page.PAGE.read_text() == argument_page.page(), (
        "docs/arguments.md is old: python scripts/argument_page.py"
    )


def test_an_argument_that_nobody_classified_is_named(monkeypatch):
    less = dict(arguments.table())
    del less["--seed"]
    monkeypatch.setattr(arguments, "table", lambda: less)
    assert argument_page.unclassified() == ["--seed"]


def test_the_command_line_s_dashes_do_not_reach_flux_allow():
    row = arguments.row_of(arguments.Argument(("--brand-new",), None))
    assert (row.option, row.kind) == ("--brand-new", "untried")

"""How `flux-megatron` ends: its exit status, one line for every error; help and completion."""

from __future__ import annotations

import re
import sys
from unittest import mock

import pytest
from started import python
from typer.testing import CliRunner
from without_torch import without_torch

from flux_megatron import __main__ as entry
from flux_megatron import cli, command_errors, errors

AGAIN = "(run again with --debug for the traceback: flux-megatron --debug results ...)"


def ended(monkeypatch, capsys, *words: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of `flux-megatron WORDS`."""
    monkeypatch.setattr(sys, "argv", ["flux-megatron", *words])
    with pytest.raises(SystemExit) as end:
        entry.main()
    output = capsys.readouterr()
    return int(end.value.code or 0), output.out, output.err


@pytest.fixture
def failing(monkeypatch):
    """`flux-megatron results` raises the `side_effect` that this is given."""
    reads = mock.Mock()
    monkeypatch.setattr("flux_megatron.lab.results.report.read", reads)
    return reads


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (errors.BadInput("--x: 1 given, 2 expected"), 2, "--x: 1 given, 2 expected"),
        (errors.ProblemMismatch("rank 1 has another"), 2, "rank 1 has another"),
        (errors.SignalTimeout("rank 1 is late"), 1, "rank 1 is late"),
        (errors.RunFailed("rank 1 failed"), 1, "rank 1 failed"),
        (ModuleNotFoundError("No module named 'yaml'", name="yaml"), 2,
         "flux-megatron results: yaml is not installed: pip install 'flux-megatron[lab]'"),
        (OSError(28, "No space left\non device"), 1,
         f"OSError: [Errno 28] No space left on device {AGAIN}"),
        (KeyError(), 1, f"KeyError {AGAIN}"),
    ],
)  # fmt: skip
def test_an_error_is_one_line_with_its_status(failing, monkeypatch, capsys, error, status, line):
    failing.side_effect = error
    assert ended(monkeypatch, capsys, "results", ".") == (status, "", f"{line}\n")
    # as other tests run commands
    assert CliRunner().invoke(cli.app, ["results", "."]).exit_code == status


def test_debug_shows_the_traceback(failing, monkeypatch):
    failing.side_effect = errors.RunFailed("rank 1 failed")
    monkeypatch.setattr(sys, "argv", ["flux-megatron", "--debug", "results", "."])
    with pytest.raises(errors.RunFailed, match="rank 1 failed"):
        entry.main()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--nope", "flux-megatron: No such option: --nope"),
        ("nope", "flux-megatron: No such command 'nope'."),
        ("bench --rounds abc", "flux-megatron bench: Invalid value for '--rounds': "),
        ("train", "flux-megatron train: Missing option '--config'."),
        ("doctor --gpus abc",
         "flux-megatron doctor: argument --gpus: 'abc' given, a number of GPUs"),
        ("doctor --nope", "flux-megatron doctor: unrecognized arguments: --nope"),
    ],
)  # fmt: skip
def test_unknown_words_are_one_line(monkeypatch, capsys, words, line):
    status, shown, said = ended(monkeypatch, capsys, *words.split())
    assert (status, shown, said.count("\n")) == (2, "", 1)
    assert said.startswith(line)
    assert said.endswith(" --help)\n")
    assert "abc" not in words or "'abc'" in said


@pytest.mark.parametrize(
    ("words", "found"),
    [("flux-megatron t", ["train", "tune"]), ("flux-megatron train --co", ["--config"])],
)
def test_a_shell_completes_commands_and_options(words, found):
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")),
             "_FLUX_MEGATRON_COMPLETE": "complete_bash"}  # fmt: skip
    assert {*found} <= {*python("-m", "flux_megatron", **asked).stdout.split()}


def test_help_begins_with_what_a_newcomer_needs():
    shown = without_torch("--help").stdout  # which it need not import
    assert re.findall(r"^[│ ]+([a-z]+)  +[A-Z]", shown, re.M)[:3] == ["doctor", "run", "tune"]


def test_a_command_names_all_that_it_lacks(monkeypatch, capsys):
    ours = command_errors.find_spec
    monkeypatch.setattr(
        command_errors, "find_spec", lambda name: ours(name) if "flux" in name else None
    )
    line = "flux-megatron train: megatron.core, numpy, psutil not installed: "
    line += "pip install 'flux-megatron[train]'\n"
    assert ended(monkeypatch, capsys, "train", "--config", "demo") == (2, "", line)

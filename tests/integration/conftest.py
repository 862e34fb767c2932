"""These tests need megatron-core. Without it they are left out, and the summary says so.

`PYTHONPATH=path/to/Megatron-LM pytest tests/integration` runs them with a checkout instead of the
installed package. Releases from 0.17 on are for Python 3.12; all that they miss in an older one is
`typing.override`.
"""

from __future__ import annotations

import importlib.util

import pytest

from flux_megatron.lab.cpu import provide_override

provide_override()
INSTALLED = importlib.util.find_spec("megatron") is not None
collect_ignore_glob = [] if INSTALLED else ["test_*.py"]


def pytest_itemcollected(item: pytest.Item) -> None:
    if "integration" in item.path.parts:
        item.add_marker("megatron")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not INSTALLED:
        terminalreporter.write_line("tests/integration left out: megatron-core is not installed")

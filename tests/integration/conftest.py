"""These tests need megatron-core. Without it they are left out, and the summary says so."""

from __future__ import annotations

import importlib.util

import pytest

INSTALLED = importlib.util.find_spec("megatron") is not None
collect_ignore_glob = [] if INSTALLED else ["test_*.py"]


def pytest_itemcollected(item: pytest.Item) -> None:
    if "integration" in item.path.parts:
        item.add_marker("megatron")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not INSTALLED:
        terminalreporter.write_line("tests/integration left out: megatron-core is not installed")

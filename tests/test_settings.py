"""The FLUX_MEGATRON_* variables: defaults, accepted values, and errors that name the variable."""

from __future__ import annotations

import runpy
import warnings
from dataclasses import FrozenInstanceError
from pathlib import Path
from types import SimpleNamespace

import pytest

from flux_megatron import settings
from flux_megatron.settings import Settings, read

ROOT = Path(__file__).parents[1]


def test_defaults():
    assert read({}) == Settings(strategy="auto", strict=False, timeout_s=None, poison=False)
    assert read({"OTHER": "1"}) == Settings()


def test_every_variable_is_read():
    environment = {
        "FLUX_MEGATRON_STRATEGY": "pipelined",
        "FLUX_MEGATRON_STRICT": "1",
        "FLUX_MEGATRON_TIMEOUT_S": "2.5",
        "FLUX_MEGATRON_POISON": "1",
        "FLUX_MEGATRON_TUNE": "on",
        "FLUX_MEGATRON_TUNE_SECONDS": "7",
        "FLUX_MEGATRON_BESIDE": "1",
        "FLUX_MEGATRON_CACHE": "/somewhere",
        "FLUX_MEGATRON_NVTX": "1",
        "FLUX_MEGATRON_NATIVE": "0",
        "FLUX_MEGATRON_ALLOW": "sft  train_step",
        "FLUX_MEGATRON_ENABLE": "1",
    }
    assert environment.keys() == {
        f"FLUX_MEGATRON_{name.upper()}" for name in Settings.__dataclass_fields__
    }
    assert read(environment) == Settings(
        "pipelined", strict=True, timeout_s=2.5, poison=True,
        tune="on", tune_seconds=7.0, beside="1", cache=Path("/somewhere"),
        nvtx=True, native=False, allow=("sft", "train_step"), enable=True,
    )  # fmt: skip


def test_the_cache_is_in_the_home_folder_by_default():
    assert read({}).cache == read({"FLUX_MEGATRON_CACHE": ""}).cache
    assert read({"FLUX_MEGATRON_CACHE": "~/plans"}).cache == Path.home() / "plans"
    assert read({}).cache == Path.home() / ".cache" / "flux_megatron"


@pytest.mark.parametrize("strategy", ["auto", "fused", "pipelined", "hopper", "sequential"])
def test_strategies(strategy):
    assert read({"FLUX_MEGATRON_STRATEGY": strategy}).strategy == strategy


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("FLUX_MEGATRON_STRATEGY", "fast", "expected one of"),
        ("FLUX_MEGATRON_STRATEGY", "", "expected one of"),
        ("FLUX_MEGATRON_STRICT", "yes", "expected 0 or 1"),
        ("FLUX_MEGATRON_STRICT", "", "expected 0 or 1"),
        ("FLUX_MEGATRON_POISON", "2", "expected 0 or 1"),
        ("FLUX_MEGATRON_NVTX", "on", "expected 0 or 1"),
        ("FLUX_MEGATRON_NATIVE", "all", "expected 0 or 1"),
        ("FLUX_MEGATRON_TIMEOUT_S", "0", "expected seconds above 0"),
        ("FLUX_MEGATRON_TIMEOUT_S", "-1", "expected seconds above 0"),
        ("FLUX_MEGATRON_TIMEOUT_S", "soon", "expected seconds above 0"),
        ("FLUX_MEGATRON_TIMEOUT_S", "inf", "expected seconds above 0"),
        ("FLUX_MEGATRON_TIMEOUT_S", "nan", "expected seconds above 0"),
        ("FLUX_MEGATRON_TUNE", "eager", "expected one of"),
        ("FLUX_MEGATRON_BESIDE", "yes", "expected one of"),
        ("FLUX_MEGATRON_BESIDE", "", "expected one of"),
        ("FLUX_MEGATRON_TUNE_SECONDS", "0", "expected seconds above 0"),
        ("FLUX_MEGATRON_TUNE_SECONDS", "long", "expected seconds above 0"),
    ],
)
def test_errors_name_the_variable_and_its_value(name, value, expected):
    with pytest.raises(ValueError, match=f"^{name}={value!r}, {expected}"):
        read({name: value})


def test_a_mistyped_name_is_said_with_the_nearest():
    given = {"FLUX_MEGATRON_STRATEGIE": "fused", "FLUX_MEGATRON_LM": "/lm", "OTHER": "1"}
    assert settings.unknown(given) == {
        "FLUX_MEGATRON_STRATEGIE": "FLUX_MEGATRON_STRATEGIE is no variable of flux_megatron, it is "
        "ignored; FLUX_MEGATRON_STRATEGY expected?"
    }
    (line,) = settings.unknown({"FLUX_MEGATRON_ZQJ": ""}).values()
    assert "known ends: LM, STRATEGY, STRICT" in line


@pytest.mark.parametrize(("rank", "times"), [(None, 1), ("0", 1), ("1", 0)])
def test_a_mistyped_name_is_said_once_and_by_one_rank(rank, times, monkeypatch):
    monkeypatch.setenv("FLUX_MEGATRON_STRATEGIE", "fused")
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    settings._warn.cache_clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        settings.reload()
        settings.reload()
    assert [str(one.message).split()[0] for one in said] == ["FLUX_MEGATRON_STRATEGIE"] * times
    monkeypatch.undo()
    settings._warn.cache_clear()
    settings.reload()


def test_read_once_until_reload(monkeypatch):
    monkeypatch.setenv("FLUX_MEGATRON_STRATEGY", "fused")
    assert settings.reload().strategy == "fused"
    monkeypatch.setenv("FLUX_MEGATRON_STRATEGY", "pipelined")
    assert settings.get().strategy == "fused"
    assert settings.reload().strategy == settings.get().strategy == "pipelined"
    monkeypatch.undo()
    settings.reload()


def test_frozen():
    with pytest.raises(FrozenInstanceError):
        settings.get().strict = True


def test_every_field_is_a_variable_in_the_table_and_the_page_has_that_table():
    for name in Settings.__dataclass_fields__:
        assert f"| FLUX_MEGATRON_{name.upper()} |" in settings.__doc__
    tables = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts/reference_tables.py")))
    assert tables.block("variables", tables.variables()) in tables.VARIABLES.read_text()

"""The FLUX_MEGATRON_* variables: defaults, accepted values, and errors that name the variable."""

import runpy
import warnings
from dataclasses import FrozenInstanceError
from pathlib import Path
from types import SimpleNamespace

import pytest

from flux_megatron import settings
from flux_megatron.settings import Settings, read

ROOT = Path(__file__).parents[1]
fields = Settings.__dataclass_fields__


def named(**values: str) -> dict[str, str]:
    return {f"FLUX_MEGATRON_{name}": value for name, value in values.items()}


def test_defaults():
    assert read({}) == Settings(strategy="auto", strict=False, timeout_s=None, poison=False)
    assert read({"OTHER": "1"}) == Settings()
    for strategy in ("auto", "fused", "pipelined", "hopper", "sequential"):
        assert read(named(STRATEGY=strategy)).strategy == strategy
    assert read({}).cache == read(named(CACHE="")).cache == Path.home() / ".cache/flux_megatron"
    assert read(named(CACHE="~/plans")).cache == Path.home() / "plans"


def test_every_variable_is_read():
    environment = named(
        STRATEGY="pipelined", STRICT="1", TIMEOUT_S="2.5", POISON="1", TUNE="on", TUNE_SECONDS="7",
        BESIDE="1", CACHE="/somewhere", NVTX="1", NATIVE="0", ALLOW="sft,  train_step", ENABLE="1",
        FP8_WIRE="1", EXPERTS="1", EXPERTS_ONCE="1", EXPERT_TOKENS="4096",
    )  # fmt: skip
    assert environment.keys() == named(**{n.upper(): "" for n in fields}).keys()
    assert read(environment) == Settings(
        "pipelined", strict=True, timeout_s=2.5, poison=True,
        tune="on", tune_seconds=7.0, beside="1", cache=Path("/somewhere"),
        nvtx=True, native=False, allow=("sft", "train_step"), enable=True, fp8_wire=True,
        experts=True, experts_once=True, expert_tokens=4096,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("STRATEGY=fast STRATEGY= TUNE=eager BESIDE=yes BESIDE=", "one of"),
        ("STRICT=yes STRICT= POISON=2 NVTX=on NATIVE=all", "0 or 1"),
        ("TIMEOUT_S=0 TIMEOUT_S=-1 TIMEOUT_S=soon TIMEOUT_S=inf TIMEOUT_S=nan", "seconds above 0"),
        ("TUNE_SECONDS=0 TUNE_SECONDS=long", "seconds above 0"),
        ("EXPERT_TOKENS=0 EXPERT_TOKENS=-1 EXPERT_TOKENS=1e3", "a whole number above 0"),
        ("TIMEOUT_S=2e10", r"seconds above 0, at most 1e\+09"),  # kernels count ns in 64 bits
        ("CACHE=~nobody9/x", "a folder: no home folder is known here for ~nobody9"),
    ],
)
def test_errors_name_the_variable_and_its_value(given, expected):
    for word in given.split():
        name, _, value = word.partition("=")
        with pytest.raises(
            ValueError, match=f"^FLUX_MEGATRON_{name}={value!r}, expected {expected}"
        ):
            read(named(**{name: value}))


def test_a_mistyped_name_is_said_with_the_nearest():
    given = named(STRATEGIE="fused", LM="/lm") | {"OTHER": "1"}
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
    with pytest.raises(FrozenInstanceError):
        settings.get().strict = True
    monkeypatch.undo()
    settings.reload()


def test_every_field_is_a_variable_in_the_table_and_the_page_has_that_table():
    for name in fields:
        assert f"| FLUX_MEGATRON_{name.upper()} |" in settings.__doc__
    tables = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts/reference_tables.py")))
    assert tables.block("variables", tables.variables()) in tables.VARIABLES.read_text()

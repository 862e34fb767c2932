"""Options of sbatch and srun, as a site or a command line gives them: long names with values.

A value is a text or a number, true for an option that takes none, null (or false) for one of ours
that is taken away.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, StrictInt, WrapValidator

from flux_megatron.launch.errors import LaunchError

# What `scripts.job` gives to sbatch.
OURS = (
    "job-name", "nodes", "ntasks-per-node", "time", "open-mode", "output", "requeue",
    "gpus-per-node", "exclusive", "mem", "signal",
)  # fmt: skip
WORDS = {"true": True, "false": None, "null": None}  # on a command line, where all is text


def worded(expected: str) -> WrapValidator:
    """Whatever pydantic refuses, the error says what was `expected`."""

    def validated(given: Any, by_pydantic: Any) -> Any:
        try:
            return by_pydantic(given)
        except ValueError:
            text = "true" if given is True else "null" if given is None else repr(given)
            raise ValueError(f"{text} given, {expected} expected") from None

    return WrapValidator(validated)


def _meant(given: Any) -> Any:
    return WORDS.get(given, given) if isinstance(given, str) else None if given is False else given


Name = Annotated[
    str,
    Field(pattern="^[A-Za-z][A-Za-z0-9_-]+$"),
    worded("the long name of an option, as cpus-per-task,"),
]
Line = Annotated[str, Field(pattern=r"^[^\p{C}\p{Zl}\p{Zp}]+$")]  # all that #SBATCH takes
Given = Literal[True] | StrictInt | Line
ONE = "a text of one line, a whole number, true"
Value = Annotated[Given | None, BeforeValidator(_meant), worded(f"{ONE} or null")]
OfSrun = dict[Name, Annotated[Given, BeforeValidator(_meant), worded(f"{ONE} where it takes none")]]
Options = dict[Name, Value]


class _OfSbatch(BaseModel, extra="allow", coerce_numbers_to_str=True):
    """Of these Slurm takes values with which a job would not be what it is meant to be."""

    time: Annotated[
        str | None,
        Field(pattern=r"(?i)^(\d+(:\d\d?){0,2}|\d+-\d\d?(:\d\d?){0,2}|UNLIMITED|INFINITE)$"),
        worded("MINUTES, HOURS:MINUTES:SECONDS, DAYS-HOURS[:MINUTES[:SECONDS]] or UNLIMITED"),
    ] = None
    mem: Annotated[
        str | None,
        Field(pattern=r"(?i)^\d+[KMGT]?$"),
        worded("0 for all of a node's, or a number with K, M, G or T behind it"),
    ] = None
    exclusive: Annotated[
        Literal[True] | Annotated[str, Field(pattern="(?i)^(true|user|mcs|topo)$")] | None,
        worded("true, user, mcs or topo"),
    ] = None
    # all that job.py listens to; in less time ranks do not end a step and save it
    signal: Annotated[
        str | None,
        Field(pattern=r"(?i)^B:(SIG)?USR1@(3\d|[4-9]\d|[1-9]\d{2,4})$"),
        worded("B:USR1@SECONDS with 30 or more"),
    ] = None


def _ours(options: Options) -> Options:
    for key, value in options.items():
        if value is None and key not in OURS:
            error = "null given, true, for an option without a value, expected"
            raise ValueError(f"{key}: {error}; null takes away one of {', '.join(OURS)}")
    return options


OfSbatch = Annotated[
    Options, AfterValidator(lambda given: _OfSbatch(**given).model_dump(exclude_unset=True))
]
OfSite = Annotated[OfSbatch, AfterValidator(_ours)]  # takes away none but ours


def refuse_stopped(options: Options) -> None:
    """`LaunchError` where `signal` stops ranks as soon as they start."""
    time, signal = str(options.get("time") or "0").upper(), str(options.get("signal") or "@0")
    before = int(signal.rpartition("@")[2])
    if time not in ("0", "UNLIMITED", "INFINITE") and _seconds(time) <= before > 0:
        raise LaunchError(
            f"--sbatch time={time} given, more than the {before} s expected in which "
            f"signal={signal} has ranks save and end"
        )


def _seconds(time: str) -> int:
    """Of MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS, DAYS-HOURS[:MINUTES[:SECONDS]]."""
    days, of_days, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    whole = [*parts, 0, 0] if of_days else [0, *parts, 0] if len(parts) < 3 else parts
    hours, minutes, seconds = whole[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def words(options: Mapping[str, Given | None]) -> list[str]:
    """As on a command line."""
    given = {key: value for key, value in options.items() if value is not None}
    return [f"--{key}" if value is True else f"--{key}={value}" for key, value in given.items()]

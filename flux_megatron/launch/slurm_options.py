"""Options of sbatch and srun, as a site or a command line gives them: long names with values.

A value is a text or a number, true for an option that takes none, null (or false) for one of ours
that is taken away.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, PlainValidator

from flux_megatron.launch.errors import LaunchError

# What `scripts.job` gives to sbatch.
OURS = (
    "job-name", "nodes", "ntasks-per-node", "time", "open-mode", "output", "requeue",
    "gpus-per-node", "exclusive", "mem", "signal",
)  # fmt: skip
WORDS = {"true": True, "false": False, "null": None}  # on a command line, where all is text
# Of these Slurm takes values with which a job would not be what it is meant to be. A pattern is
# that of a whole value, in whatever case.
PATTERNS = {
    "time": (
        r"\d+(:\d\d?){0,2}|\d+-\d\d?(:\d\d?){0,2}|UNLIMITED|INFINITE",
        "MINUTES, HOURS:MINUTES:SECONDS, DAYS-HOURS[:MINUTES[:SECONDS]] or UNLIMITED",
    ),
    "mem": (r"\d+[KMGT]?", "0 for all of a node's, or a number with K, M, G or T behind it"),
    "exclusive": ("TRUE|USER|MCS|TOPO", "true, user, mcs or topo"),
    # all that job.sbatch listens to; in less time ranks do not end a step and save it
    "signal": (r"B:(SIG)?USR1@(3\d|[4-9]\d|[1-9]\d{2,4})", "B:USR1@SECONDS with 30 or more"),
}


def like(pattern: str, expected: str) -> AfterValidator:
    """For a text of pydantic's."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise _refused(text, expected)
        return text

    return AfterValidator(check)


def _refused(given: object, expected: str) -> ValueError:
    text = "true" if given is True else "null" if given is None else repr(given)
    return ValueError(f"{text} given, {expected} expected")


def _value(given: Any) -> str | int | None:
    """A text has one line, because that is all that #SBATCH takes."""
    value = WORDS.get(given, given) if isinstance(given, str) else given
    if value is None or value is False:
        return None
    if isinstance(value, int) or (isinstance(value, str) and value and value.isprintable()):
        return value
    raise _refused(given, "a text of one line, a whole number, true or null")


def _checked(options: Options) -> Options:
    wrong = [
        f"{key}: {_refused(options[key], expected)}"
        for key, (pattern, expected) in PATTERNS.items()
        if options.get(key) is not None
        and not re.fullmatch(pattern, str(options[key]), re.IGNORECASE)
    ]
    if wrong:
        raise ValueError("; ".join(wrong))
    return options


def nulls(allowed: Collection[str]) -> AfterValidator:
    """For options of which a site takes away none but those `allowed`."""
    known = f"null takes away one of {', '.join(allowed)}" if allowed else "none can be taken away"

    def check(options: Options) -> Options:
        for key, value in options.items():
            if value is None and key not in allowed:
                error = _refused(None, "true, for an option without a value,")
                raise ValueError(f"{key}: {error}; {known}")
        return options

    return AfterValidator(check)


Name = Annotated[
    str, like(r"[A-Za-z][A-Za-z0-9_-]+", "the long name of an option, as cpus-per-task,")
]
Options = dict[Name, Annotated[Any, PlainValidator(_value)]]
OfSbatch = Annotated[Options, AfterValidator(_checked)]


def refuse_stopped(options: Mapping[str, str | int | None]) -> None:
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


def words(options: Mapping[str, str | int | None]) -> list[str]:
    """As on a command line."""
    given = {key: value for key, value in options.items() if value is not None}
    return [f"--{key}" if value is True else f"--{key}={value}" for key, value in given.items()]

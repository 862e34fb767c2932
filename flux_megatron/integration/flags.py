"""Our arguments in Megatron's parser: `--flux-overlap`, and knobs that make no sense without it.

A knob that is not given leaves its FLUX_MEGATRON_* variable, or else the default, in force. So None
stands for "not given" everywhere.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any

from flux_megatron.settings import STRATEGIES, TUNE

LAYERS = ("qkv", "proj", "fc1", "fc2", "head")


@dataclass(frozen=True)
class FluxOptions:
    """What `--flux-overlap` was given with; each field is `--flux-` and its name."""

    layers: tuple[str, ...] | None = None
    strategy: str | None = None
    save_gathered: bool | None = None
    experts: bool | None = None
    tune: str | None = None
    tune_seconds: float | None = None
    cache: str | None = None
    deterministic: bool | None = None
    strict: bool | None = None
    trace: bool | None = None
    compare: int | None = None
    allow: tuple[str, ...] | None = None

    def environment(self) -> dict[str, str]:
        """The settings that were given, as the variables which `settings` reads."""
        given = {
            "STRATEGY": self.strategy,
            "TUNE": self.tune or ("off" if self.deterministic else None),
            "TUNE_SECONDS": self.tune_seconds,
            "CACHE": self.cache,
            "EXPERTS": None if self.experts is None else int(self.experts),
            "STRICT": None if self.strict is None else int(self.strict),
            "NVTX": 1 if self.trace else None,
            "ALLOW": " ".join(self.allow) if self.allow else None,
        }
        return {f"FLUX_MEGATRON_{name}": str(v) for name, v in given.items() if v is not None}


def add_flux_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group to Megatron's parser, or another; returns the parser.

    One that has it, because Megatron was patched to add it too, stays as it is.
    """
    if "--flux-overlap" in parser._option_string_actions:
        return parser
    group = parser.add_argument_group(
        "flux_megatron", "communication of tensor parallelism behind the GEMMs"
    )

    def knob(name: str, text: str, **more: Any) -> None:
        group.add_argument(name, default=None, help=text, **more)

    def switch(name: str, text: str) -> None:
        knob(name, text, action="store_true")

    group.add_argument(
        "--flux-overlap", action="store_true",
        help="run tensor-parallel linear layers as one operation with their communication",
    )  # fmt: skip
    knob(
        "--flux-layers", f"only these of {' '.join(LAYERS)} (head: LM head); default: all",
        nargs="+", choices=LAYERS,
    )  # fmt: skip
    knob(
        "--flux-strategy", "how every call overlaps; default: auto, which chooses for each",
        choices=STRATEGIES,
    )  # fmt: skip
    switch(
        "--flux-save-gathered",
        "keep the gathered input of qkv, fc1 and head for backward: memory for one gather less",
    )
    switch(
        "--flux-experts",
        "run the GEMMs of a Mixture of Experts as one operation with their all-to-all",
    )
    knob(
        "--flux-tune", "on: the first call of a layer kind races plans; default: auto, on GPUs, or "
        "met, for the numbers of tokens that come, where all micro-batches have as many",
        choices=TUNE,
    )  # fmt: skip
    knob("--flux-tune-seconds", "seconds of a run for these races; default: 10", type=float)
    knob("--flux-cache", "folder of measured plans; default: ~/.cache/flux_megatron", metavar="DIR")
    switch(
        "--flux-deterministic",
        "race nothing in the run, so that runs with the same measured plans give the same bits; "
        "implied by --deterministic-mode",
    )
    switch("--flux-strict", "fail where a call would run without overlap")
    switch("--flux-trace", "name every phase of a call in profilers (NVTX ranges)")
    knob(
        "--flux-compare", "run N iterations on megatron-core's own code and N on ours in turn, and "
        "log the speedup with its 95 %% interval", type=int, metavar="N",
    )  # fmt: skip
    knob(
        "--flux-allow", "go on although these arguments of Megatron (without dashes) or functions "
        "of it are unknown or were never tried", nargs="+", metavar="NAME",
    )  # fmt: skip
    return parser


def options_from(args: Any) -> FluxOptions | None:
    """The options, or None without `--flux-overlap`.

    `ValueError` for a knob without `--flux-overlap`, and for knobs that contradict each other.
    """
    names = [field.name for field in fields(FluxOptions)]
    given: dict[str, Any] = {name: getattr(args, f"flux_{name}", None) for name in names}
    if not getattr(args, "flux_overlap", False):
        useless = " ".join(f"--flux-{name}" for name, value in given.items() if value is not None)
        if useless:
            flags = useless.replace("_", "-")
            raise ValueError(f"{flags} given without --flux-overlap, which it needs")
        return None
    given["deterministic"] = given["deterministic"] or getattr(args, "deterministic_mode", None)
    if given["deterministic"] and given["tune"] == "on":
        raise ValueError(
            "--flux-tune on given with --flux-deterministic or --deterministic-mode: measured "
            "times choose the order of sums; measure ahead of the run with flux-megatron tune"
        )
    if given["compare"] is not None:
        _check_compare(given["compare"], args)
    for name in ("layers", "allow"):
        given[name] = tuple(given[name]) if given[name] else None
    return FluxOptions(**given)


def names_given(
    what: str, given: Collection[str] | None, known: tuple[str, ...] = ()
) -> tuple[str, ...] | None:
    """The names, None for none. `ValueError` for a text, and for other names than `known` ones."""
    if given is None:
        return None
    wrong = isinstance(given, str) or not all(isinstance(name, str) for name in given)
    if wrong or not given or (known and {*given} - {*known}):
        raise ValueError(f"{what} is {given!r}, a list of {', '.join(known) or 'names'} expected")
    return tuple(given)


def _check_compare(block: int, args: Any) -> None:
    if block < 2:
        raise ValueError(
            f"--flux-compare {block} given, 2 or more expected: the first of a block only warms up"
        )
    graphs = ("enable_cuda_graph", "external_cuda_graph")  # which Megatron makes an implementation
    if any(getattr(args, name, None) for name in graphs) or (
        getattr(args, "cuda_graph_impl", None) not in (None, "none")
    ):
        raise ValueError(
            "--flux-compare given with CUDA graphs, which replay what they captured in both arms"
        )

"""docs/recipes.md: launches that people run, and what `--flux-overlap` says to each of them.

`python scripts/recipe_page.py` writes it. recipes.tsv has the facts, recipe_words.tsv the options
that their words mean. Every verdict is that of `flux_megatron.integration.requirements`, asked as
on GPUs with TransformerEngine.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from unittest import mock

from megatron.core.extensions import transformer_engine

from flux_megatron.integration import arguments, parser_signature, requirements

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "recipes.md"
RELEASE = "main-d98e8a64"  # whose options the words are
DEGREES = {"TP": "tensor-model", "PP": "pipeline-model", "CP": "context", "EP": "expert-model"}
NEVER_TRIED = {"vision", "diffusion", "own_spec", "lora"}  # docs/frameworks.md
FIELDS = {"fp8_format": "fp8"}  # of an option that sets an attribute of another name
LISTS = ("spec", "cuda_graph_modules", "recompute_modules")
# what a launch without GPUs and TransformerEngine lacks, and what two ranks have no room for
ON_GPUS = {
    "--fp8-format", "--multi-latent-attention", "--hybrid-layer-pattern", "--cuda-graph-impl",
    "--context-parallel-size", "--delay-wgrad-compute", "--defer-embedding-wgrad-compute",
    "--moe-shared-expert-overlap",
}  # fmt: skip
LARGE = {
    "--pipeline-model-parallel-size", "--num-virtual-stages-per-pipeline-rank", "--hidden-size",
    "--moe-grouped-gemm",
}  # fmt: skip
SMALL = {"--tensor-model-parallel-size": "2", "--expert-model-parallel-size": "2",
         "--num-experts": "4", "--moe-router-topk": "2"}  # fmt: skip
HEAD = """# Launches that people run

What does this version say to the launches of six projects, on GPUs with TransformerEngine?
`python scripts/recipe_page.py` asks it with the arguments of `scripts/recipes.tsv`, and writes
this page.

- *runs*: nothing is refused. *if allowed*: `--flux-allow` must name an option, which is
  [untried](arguments.md#untried) or loses speed. *refused*: the run ends with this reason.
- *launched*: tests run these arguments on CPU, TP 2, in small widths, without pipeline stages and
  grouped GEMMs. *by option*: tests show each option, none all together. *nothing shows*: the model
  is of another kind, or has adapters of Megatron-Bridge.

No recipe ran in its own size; [Support](support.md) has what ran on GPUs. `--flux-overlap` takes
the place of userbuffers. The arguments are those of the repositories, in August 2026 (verl:
January); widths and numbers of experts are those that the models are known for. Of Megatron-Bridge
this is every recipe for H100 under `perf_recipes` with TP above 1, without `_h100` and `_config` in
its name.
"""
TABLE = """## {}

| verdict | recipes |
| --- | --- |"""


def read(name: str) -> list[dict[str, str]]:
    with (HERE / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


WORDS = {row["word"]: row["options"] for row in read("recipe_words.tsv")}
ROWS = read("recipes.tsv")


def command(row: dict[str, str]) -> list[str]:
    """What a launch by Megatron-LM's script gives for a row, other sizes left out."""
    words = [f"--{name}-parallel-size {row[column]}" for column, name in DEGREES.items()
             if row[column] != "1"]  # fmt: skip
    if row["VP"] != "1":
        words.append(f"--num-virtual-stages-per-pipeline-rank {row['VP']}")
    if row["EP"] != "1":
        words.append(f"--expert-tensor-parallel-size {row['ETP']}")
    if row["SP"] == "yes":
        words.append("--sequence-parallel")
    words += [WORDS[word] for word in (row["model"], row["precision"], *row["facts"].split())]
    return " ".join(words).split()


def refusals(given: list[str]) -> list[requirements.Refusal]:
    args = argparse.Namespace(transformer_impl="transformer_engine",
                              gradient_accumulation_fusion=True)  # fmt: skip
    known = {}
    for option, *values in parser_signature.options(given):
        name = option.lstrip("-").replace("-", "_")
        name = FIELDS.get(name, name)
        value = values if name in LISTS else values[0] if values else True
        setattr(args, name, int(value) if str(value).isdigit() else value)
        known[name] = arguments.Argument((option,), None)
    with (
        mock.patch.object(requirements, "te_can_run", return_value=True),
        mock.patch.object(transformer_engine, "HAVE_TE", True),
    ):
        found = requirements.refusals(args, known)
    return [r for r in found if r.name.startswith("--")]  # others are of this environment


def verdict(given: list[str]) -> str:
    found = refusals(given)
    what = "if allowed"
    if refused := [r for r in found if not r.may_be_allowed]:
        what, found = "refused", refused
    # an option may be refused for several reasons
    reasons = "; ".join(dict.fromkeys(f"`{r.name}`: {r.why}" for r in found))
    return f"{what}: {reasons}" if found else "runs"


def kind(row: dict[str, str]) -> tuple[str, ...]:
    """The options of a launch on two ranks without GPUs; none where that lacks something."""
    given = sorted(parser_signature.options(command(row)))
    if {option[0] for option in given} & ON_GPUS or {"flex", *NEVER_TRIED} & {*_facts(row)}:
        return ()
    return tuple(" ".join([name, SMALL[name]] if name in SMALL else [name, *values])
                 for name, *values in given if name not in LARGE)  # fmt: skip


def page() -> str:
    lines = [HEAD]
    for project in dict.fromkeys(row["project"] for row in ROWS):
        lines.append(TABLE.format(project))
        alike: dict[str, list[str]] = {}
        for row in ROWS:
            if row["project"] == project:
                alike.setdefault(_said(row), []).append(row["recipe"])
        lines += [f"| {said} | {', '.join(recipes)} |" for said, recipes in alike.items()]
        lines.append("")
    return "\n".join(lines)


def _said(row: dict[str, str]) -> str:
    said = verdict(command(row))
    return said if said.startswith("refused") else f"{said}; {_tried(row)}"


def _tried(row: dict[str, str]) -> str:
    if never := [fact for fact in _facts(row) if fact in NEVER_TRIED]:
        return f"nothing shows: {', '.join(never)}".replace("_", " ")
    return "launched" if kind(row) else "by option"


def _facts(row: dict[str, str]) -> list[str]:
    return row["facts"].split()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)

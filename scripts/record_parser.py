"""`python scripts/record_parser.py path/to/Megatron-LM core_v0.20.0`: what its parser accepts.

Writes the options of the checkout, whose `megatron.training` this Python can import, and ours into
`flux_megatron/launch/signatures.tsv`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from flux_megatron.launch.parser_signature import ALL, FILE, OURS, TYPES, Signature, recorded

# Runs beside the checkout.
DUMP = """
import argparse, json, sys
sys.path[:0] = [{checkout!r}, {scripts!r}]
from flux_megatron.lab.cpu import provide_override
provide_override()
from megatron.training.arguments import add_megatron_arguments
from record_parser import signature_of
parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
print()  # imports may have left a line unfinished
print(json.dumps(signature_of(parser)))
"""


def record(checkout: Path, release: str) -> None:
    """`RuntimeError` with the end of the parser's output if it cannot be imported."""
    code = DUMP.format(checkout=str(checkout.resolve()), scripts=str(Path(__file__).parent))
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600
    )
    if done.returncode:
        raise RuntimeError(f"{checkout} has no parser that could be run:\n{done.stderr[-2000:]}")
    FILE.write_text(table(recorded() | {release: json.loads(done.stdout.splitlines()[-1])}))


def signature_of(parser: argparse.ArgumentParser) -> Signature:
    """An option is `flag`, `int`, `float` or `str` where that is all; else its type, its choices
    and how many values it takes.
    """
    return {
        string: _described(action)
        for action in parser._actions
        for string in action.option_strings
        if string.startswith("--")
    }


def _described(action: argparse.Action) -> str | dict[str, Any]:
    if action.nargs == 0:
        return "flag"
    name = getattr(action.type, "__name__", "str")
    described: dict[str, Any] = {"type": name if name in TYPES else "str"}
    if action.choices is not None:
        described["choices"] = [getattr(choice, "name", choice) for choice in action.choices]
    if action.nargs is not None:
        described["nargs"] = action.nargs
    return described if len(described) > 1 else str(described["type"])


def table(signatures: dict[str, Signature]) -> str:
    """`signatures.tsv`, sorted: after its head, which names the releases, an option, its type in
    JSON and who has it.
    """
    names = sorted(signatures.keys() - {OURS})
    having: dict[tuple[str, str], list[str]] = {}
    for name in [*names, OURS]:
        for option, described in signatures[name].items():
            having.setdefault((option, json.dumps(described)), []).append(name)
    lines = [f"option\ttype\t{' '.join(names)}"]
    for (option, described), who in sorted(having.items()):
        lines.append(f"{option}\t{described}\t{ALL if who == names else ' '.join(who)}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    record(Path(sys.argv[1]), sys.argv[2])
    print(FILE)

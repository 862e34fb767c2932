"""Every source mutant must fail the test that its list names; and every file that runs in a call
has a mutant, here or in `mutants.py`.

Run as a script, this file prints how many mutants each file has:

    TRITON_INTERPRET=1 PYTHONPATH=. python tests/protocol/test_source_mutants.py
"""

from __future__ import annotations

import importlib.util
from collections import Counter

import pytest
from interpreted_access import needs_interpreter
from mutants import MUTANTS
from source_mutants import SOURCE_MUTANTS, outcome
from virtual_machine import SOURCE

ROOMS = ("kernels", "overlap", "expert_parallel", "symm", "tuning", "nn", "embedding", "device")
FAILED = pytest.ExitCode.TESTS_FAILED
MEGATRON = importlib.util.find_spec("megatron") is not None


@needs_interpreter  # on GPUs ranks are spawned, and would import the module as it is
@pytest.mark.parametrize("mutant", SOURCE_MUTANTS, ids=str)
def test_mutant_is_caught(mutant, tmp_path):
    if not MEGATRON and mutant.mutation.path.startswith(("integration/", "lab/train/")):
        pytest.skip("megatron-core is not installed")
    code = outcome(mutant, tmp_path / "log")
    assert code == FAILED, f"exit code {code}\n{(tmp_path / 'log').read_text()}"


def mutants_by_file() -> Counter[str]:
    """How many mutants each file of the rooms has that run in a call."""
    files = [file for room in ROOMS for file in (SOURCE / room).rglob("*.py")]
    counts = Counter(
        {str(file.relative_to(SOURCE)): 0 for file in files if file.stem != "__init__"}
    )
    counts.update(mutant.mutation.path for mutant in (*MUTANTS, *SOURCE_MUTANTS))
    return counts


def test_every_file_that_runs_in_a_call_has_mutants():
    without = sorted(file for file, count in mutants_by_file().items() if not count)
    assert not without, f"files without a mutant: {without}"


def test_names_are_unique():
    assert len({mutant.name for mutant in SOURCE_MUTANTS}) == len(SOURCE_MUTANTS)


if __name__ == "__main__":
    for file, count in sorted(mutants_by_file().items()):
        print(f"{count:4} {file}")

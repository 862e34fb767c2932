"""Every source mutant must fail the test that its list names; and every file that runs in a call
has a mutant, here or in `mutants.py`.
"""

from __future__ import annotations

import importlib.util

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


def test_every_file_that_runs_in_a_call_has_mutants():
    found = (file for room in ROOMS for file in (SOURCE / room).rglob("*.py"))
    files = {str(file.relative_to(SOURCE)) for file in found if file.stem != "__init__"}
    without = files - {mutant.mutation.path for mutant in (*MUTANTS, *SOURCE_MUTANTS)}
    assert not without, f"files without a mutant: {sorted(without)}"


def test_names_are_unique():
    names = [mutant.name for mutant in (*MUTANTS, *SOURCE_MUTANTS)]
    assert len({*names}) == len(names)

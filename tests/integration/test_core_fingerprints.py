"""The installed megatron-core is the one whose fingerprints are recorded in `patches/`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from flux_megatron.patching import installed
from flux_megatron.patching.checkout import examine


def test_what_we_rely_on_is_as_recorded():
    package, *_ = importlib.util.find_spec("megatron").submodule_search_locations
    state = examine(Path(package).parent)
    if state.version != state.series.version:
        pytest.skip(f"megatron-core {state.version} is not recorded in patches/")
    # wheels may lack megatron.training
    assert not [text for text in state.differences if text.startswith("megatron/core/")]
    assert not installed.changed()  # what a launch asks

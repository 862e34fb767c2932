"""Which functions of a Megatron are those of no recorded release: from their text alone."""

from __future__ import annotations

import pytest

from flux_megatron.patching import installed
from flux_megatron.patching.fingerprints import digest, functions
from flux_megatron.patching.series import Series, hunks, supported

LAYERS = "megatron/core/tensor_parallel/layers.py"
SOURCE = """
class ColumnParallelLinear:
    def forward(self, x):
        return x

class RowParallelLinear:
    def forward(self, x):
        return x
"""


@pytest.fixture
def known():
    """Two releases, the older of which has one function alone."""
    found = {name: function.sha256 for name, function in functions(SOURCE).items()}
    old = {"ColumnParallelLinear.forward": "0" * 64}
    new = {name: sha256 for name, sha256 in found.items() if "." in name}
    return [
        Series(None, "1.0.0", {LAYERS: old}, {}),
        Series(None, "2.0.0", {LAYERS: new}, {LAYERS: digest(SOURCE)}),
    ]


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("", "", []),
        ("class Row", "import math\n\nclass Row", []),  # the file differs, its functions do not
        ("Row", "Wide", []),  # the older release has none either
        ("return x", "return x + 1", ["ColumnParallelLinear.forward", "RowParallelLinear.forward"]),
        ("Column", "Tall", ["ColumnParallelLinear.forward"]),
    ],
)
def test_changed_and_missing_functions_are_named(known, old, new, names):
    found = [name for name, _ in installed.differences(LAYERS, SOURCE.replace(old, new), known)]
    assert found == names


def test_a_known_file_is_not_parsed(known, monkeypatch):
    monkeypatch.setattr(installed, "functions", None)
    assert not [*installed.differences(LAYERS, SOURCE, known)]


@pytest.mark.parametrize("series", supported(), ids=lambda series: series.folder.name)
def test_every_release_has_its_files(series):
    assert series.files.keys() == series.hashes.keys() - {hunk.path for hunk in hunks()}

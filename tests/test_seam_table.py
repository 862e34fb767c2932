"""Every name by which an option of a recorded Megatron-LM reaches our layers has a decision."""

import json
import sys
from pathlib import Path

import pytest

from flux_megatron.integration import seams
from flux_megatron.patching.series import supported

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
from record_release import SEAMS, names

RELEASES = {
    series.folder.name: json.loads((series.folder / SEAMS).read_text()) for series in supported()
}

LAYERS = """
class ColumnParallelLinear:
    def __init__(self, size, *, bias=True):
        self.size = size

    def forward(self, input_, weight=None):
        return self._forward_impl(input=input_, weight=weight, brand_new=self.size)

    def _forward_impl(self, **options):
        return options
"""
CONFIG = "class TransformerConfig:\n    width: int = 3\n    height: int\n\n    def f(self): ...\n"
PROVIDER = "class LocalSpecProvider:\n    def linear(self): ...\n\n    def norm(self, rms): ...\n"


def undecided(release: str) -> list[str]:
    found = RELEASES[release]
    names = {(seam, n) for seam in ("provider", "linear", "forward") for n in found[seam]}
    fields = [name for name in found["config"] if seams.row_of_field(name) is None]
    return fields + [name for _, name in names - seams.table().keys()]


@pytest.mark.parametrize("release", RELEASES)
def test_every_name_of_a_recorded_release_is_decided(release):
    assert not undecided(release)


@pytest.mark.parametrize("seam", ["config", "provider", "linear", "forward"])
def test_a_name_that_nobody_decided_on_is_seen(monkeypatch, seam):
    newest = RELEASES["main-d98e8a64"]
    monkeypatch.setitem(newest, seam, [*newest[seam], "brand_new"])
    assert undecided("main-d98e8a64") == ["brand_new"]


def test_every_row_is_a_name_of_some_release():
    names = {(seam, n) for found in RELEASES.values() for seam in found for n in found[seam]}
    assert not seams.table().keys() - names


def test_names_of_a_checkout(tmp_path):
    for path, text in {
        "tensor_parallel/layers.py": LAYERS,
        "transformer/transformer_config.py": CONFIG,
        "models/backends.py": PROVIDER,
    }.items():
        file = tmp_path / "megatron" / "core" / path
        file.parent.mkdir(parents=True)
        file.write_text(text)
    assert names(tmp_path) == {
        "config": ["height", "width"],
        "provider": ["linear", "norm", "norm.rms"],
        "linear": ["bias", "size"],
        "forward": ["brand_new", "input", "input_", "weight"],
    }


def test_a_field_has_its_own_row_or_that_of_its_argument():
    of_arguments = {"bf16": "--bf16", "rotary_interleaved": "--rotary-interleaved"}
    own = {name: name for name in ("fp8", "tensor_parallel_num_weight_shards")}
    for field, option in (of_arguments | own).items():
        assert seams.row_of_field(field).option == option
    assert seams.row_of_field("brand_new") is None

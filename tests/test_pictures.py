"""The pictures of docs/how are those that scripts/draw_pictures.py draws."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_committed_pictures_are_the_scripts(tmp_path):
    script = runpy.run_path(str(ROOT / "scripts/draw_pictures.py"))
    script["Picture"].save.__globals__["OUT"] = tmp_path
    for name in (
        "patterns", "backward", "memory", "signals", "signalled", "expert_parallel",
        "signalled_experts", "own_kernel",
    ):  # fmt: skip
        script[name]()
        drawn = (tmp_path / f"{name}.svg").read_text(encoding="utf-8")
        assert drawn == (ROOT / f"docs/how/{name}.svg").read_text(encoding="utf-8")

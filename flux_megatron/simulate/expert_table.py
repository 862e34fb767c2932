"""The table of docs/simulator.md of a model with experts.

    python -m flux_megatron.simulate.expert_table docs/simulator.md

renews it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from flux_megatron.perf.calibration import renew
from flux_megatron.simulate.dlrm_tables import markdown
from flux_megatron.simulate.predictions import Network, predict

STUDY = "study/mixtral-8x7b_h200"
ALL_TO_ALL = "expert all-to-all"


def table() -> str:
    """A row for the study as it is, and for every other value of what it assumes."""
    found = predict(STUDY, {}, (), Network(), [], alternatives=True)
    head = ["assumption", "Megatron ms", "of it all-to-all", "ours ms", "of it all-to-all"]
    rows = [[*head, "over Megatron"]]
    changes = [(f"{one.key} = {one.value}", one.steps) for one in found.alternatives if one.steps]
    for label, steps in [("as assumed", found.steps), *changes]:
        cells = []
        for arm in ("megatron", "flux"):
            step = steps[arm]
            cells += [f"{step.step_us / 1e3:.0f}", f"{step.parts[ALL_TO_ALL] / step.step_us:.1%}"]
        rows.append([label, *cells, f"{found.speedups('flux', steps):.3f}"])
    return markdown(rows)


def main(page: Path) -> None:
    page.write_text(renew(page.read_text(), "experts", table()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

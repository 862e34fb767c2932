"""What is predicted of a DLRM study: tables of the terminal, and JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from flux_megatron.lab.perf.dlrm_step import ARMS, Arm
from flux_megatron.lab.simulate import study
from flux_megatron.lab.simulate.study import Alternative, StudyFile

if TYPE_CHECKING:
    from rich.table import Table

NEAR = (0.19, 0.23)  # of the study's figure, about 21 %
FUSED: tuple[Arm, ...] = ARMS[1:]

Rows = list[list[str]]


def steps(found: StudyFile) -> Rows:
    """A column an arm: the step, its parts, and by how much it is shorter."""
    arms = study.predict(found.study)
    rows = [["", *arms], ["step", *(_ms(one.step_us) for one in arms.values())]]
    rows += [
        [part, *(_ms(one.parts[part]) for one in arms.values())] for part in arms["unfused"].parts
    ]
    rows.append(["shorter by", "", *(f"{study.reduction(arms, arm):.1%}" for arm in FUSED)])
    if "reduction" in found.paper:
        rows.append(["the paper's", "", *[str(found.paper["reduction"])] * 2, ""])
    return rows


def alternatives(found: StudyFile) -> Rows:
    """A row for every other value of what is assumed, one at a time."""
    rows = [["assumption", "unfused step", *(f"{arm}: shorter by" for arm in FUSED)]]
    arms = study.predict(found.study)
    rows.append(_row("as assumed", Alternative({}, arms)))
    for one in study.one_at_a_time(found):
        ((key, value),) = one.values.items()
        rows.append(_row(f"{key} = {value}", one))
    return rows


def ranges(found: StudyFile) -> Rows:
    """An arm a row, over all combinations of network, pooling and batch."""
    tried = [one.arms for one in study.jointly(found) if one.arms]
    rows = [["arm", "combinations", "shorter by", "by 19 to 23 %"]]
    for arm in FUSED if tried else ():
        shares = [study.reduction(arms, arm) for arms in tried]
        near = sum(NEAR[0] <= share <= NEAR[1] for share in shares)
        rows.append([arm, str(len(shares)), f"{min(shares):.1%} to {max(shares):.1%}", f"{near}"])
    return rows


def _row(label: str, one: Alternative) -> list[str]:
    if not one.arms:
        return [label, f"refused: {one.refused}", *[""] * len(FUSED)]
    reductions = (f"{study.reduction(one.arms, arm):.1%}" for arm in FUSED)
    return [label, _ms(one.arms["unfused"].step_us), *reductions]


def _ms(us: float) -> str:
    return f"{us / 1e3:.1f} ms"


def plain(found: StudyFile, swept: bool) -> dict[str, Any]:
    """All of it in the types of JSON; times in microseconds."""
    arms = study.predict(found.study)
    tried = [*study.one_at_a_time(found), *study.jointly(found)] if swept else []
    return {
        "study": found.name,
        "values": asdict(found.study),
        "stated": found.stated,
        "assumed": found.assumed,
        "paper": found.paper,
        "arms": {arm: asdict(one) for arm, one in arms.items()},
        "reductions": {arm: study.reduction(arms, arm) for arm in FUSED},
        "alternatives": [
            {
                "values": one.values,
                "refused": one.refused,
                "step_us": {arm: step.step_us for arm, step in one.arms.items()},
            }
            for one in tried
        ],
    }


def shown(found: StudyFile, swept: bool) -> Iterator[str | Table]:
    """Each table after its heading, then what the figures rest on."""
    network = found.study.network
    yield (
        f"{found.name}: {network.nodes} x {found.study.gpu.name}, {network.kind} "
        f"{' x '.join(map(str, network.shape))}, batch {found.study.step.global_batch}"
    )
    yield _table(steps(found))
    if swept:
        yield "\nOther values of what is assumed, one at a time"
        yield _table(alternatives(found))
        yield "\nAll combinations of bandwidth, latency, pooling and batch"
        yield _table(ranges(found))
    if "section" in found.paper:
        yield f"The paper's figure: {found.paper['section']}."
    yield "Assumed:"
    for key, why in found.assumed.items():
        yield f"  {key}: {why}"
    yield "How far to trust it: docs/performance.md."


def _table(rows: Rows) -> Table:
    from rich.table import Table

    table = Table(*rows[0])
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows[1:]:
        table.add_row(*row)
    return table

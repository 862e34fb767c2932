"""What is predicted of a DLRM study: tables of the terminal, and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from flux_megatron.lab.perf.dlrm_step import ARMS, Arm, Prediction
from flux_megatron.lab.simulate import study, tables
from flux_megatron.lab.simulate.study import StudyFile

if TYPE_CHECKING:
    from rich.table import Table

NEAR = (0.19, 0.23)  # of the study's figure, about 21 %
FUSED: tuple[Arm, ...] = ARMS[1:]


def shown(found: StudyFile, swept: bool) -> Iterator[str | Table]:
    """Each table after its heading, then what the figures rest on."""
    network, arms = found.study.network, study.predict(found.study)
    yield (
        f"{found.name}: {network.nodes} x {found.study.gpu.name}, {network.kind} "
        f"{' x '.join(map(str, network.shape))}, batch {found.study.step.global_batch}"
    )
    yield tables.parts(arms)
    yield _reductions(found, arms)
    if swept:
        yield tables.ONE_AT_A_TIME
        tried = study.one_at_a_time(found)
        yield tables.others("unfused", arms, tried, "shorter by", lambda arm, of: _share(of, arm))
        yield "\nAll combinations of bandwidth, latency, pooling and batch"
        yield _ranges(found)
    if "section" in found.paper:
        yield f"The paper's figure: {found.paper['section']}."
    yield "Assumed:"
    for key, why in found.assumed.items():
        yield f"  {key}: {why}"
    yield "How far to trust it: docs/performance.md."


def _share(arms: Mapping[Arm, Prediction], arm: Arm) -> str:
    return f"{study.reduction(arms, arm):.1%}"


def _reductions(found: StudyFile, arms: Mapping[Arm, Prediction]) -> Table:
    """The paper's figure is for its own arms."""
    from rich.table import Table

    table = Table("arm", "step, ms", "shorter by", "the paper's")
    paper = str(found.paper.get("reduction", ""))
    for arm, step in arms.items():
        cells = ("", "") if arm == "unfused" else (_share(arms, arm), paper * (arm != "ours"))
        table.add_row(arm, f"{step.step_us / 1e3:.1f}", *cells)
    return table


def _ranges(found: StudyFile) -> Table:
    """An arm a row, over all combinations of network, pooling and batch."""
    from rich.table import Table

    table = Table("arm", "combinations", "shorter by", "by 19 to 23 %")
    tried = [one.steps for one in study.jointly(found) if one.steps]
    for arm in FUSED if tried else ():
        shares = [study.reduction(arms, arm) for arms in tried]
        near = sum(NEAR[0] <= share <= NEAR[1] for share in shares)
        table.add_row(arm, str(len(shares)), f"{min(shares):.1%} to {max(shares):.1%}", f"{near}")
    return table


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
        "alternatives": [{"values": one.values, **tables.figures(one)} for one in tried],
    }

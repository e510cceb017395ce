"""The best schedule that a search finds for given costs and memory; see ``schedules.search``."""

from __future__ import annotations

from collections.abc import Sequence

from schedules.costs import Costs
from schedules.greedy import Metric
from schedules.registry import CHOSEN, Shape, Stages, schedule
from schedules.schedule import Schedule


@schedule(
    "auto",
    stages_per_rank=Stages(CHOSEN),
    splits_backward=True,
    chooses=True,
    peak=lambda ranks, stages_per_rank, micro_batches: min(ranks, micro_batches),
)
def auto(
    shape: Shape,
    *,
    costs: Costs | None = None,
    memory_cap: float | Sequence[float] | None = None,
    memory_bytes: float | Sequence[float] | None = None,
    metric: Metric = "makespan",
    placement: str | None = None,
    polish: bool = False,
) -> Schedule:
    """The shortest schedule that a search finds for the costs and the memory there is."""
    from schedules.search import search, task_for  # it begins with every schedule by name, this file's among them

    task = task_for(
        shape.ranks,
        shape.micro_batches,
        shape.stages_per_rank or None,
        costs=costs,
        memory_cap=memory_cap,
        memory_bytes=memory_bytes,
        metric=metric,
        placement=placement,
        polish=polish,
    )
    return search(task).schedule

"""A part of a schedule that is a schedule again: fewer micro-batches, or the forwards alone."""

from __future__ import annotations

from schedules.schedule import Schedule
from schedules.table import KIND, MICRO_BATCH, F, kept

__all__ = ["forwards_of", "shortened"]


def shortened(schedule: Schedule, micro_batches: int) -> Schedule:
    """The same order without the last micro-batches, for a step whose data ends early.

    Micro-batches do not depend on each other, so what is left of a legal order is legal.
    """
    return schedule if micro_batches == schedule.micro_batches else _kept(schedule, micro_batches, schedule.name)


def forwards_of(schedule: Schedule, micro_batches: int) -> Schedule:
    """The forwards alone, on the same placement: how a model laid out for training is evaluated."""
    return _kept(schedule, micro_batches, "forward-only", kind=F)


def _kept(schedule: Schedule, micro_batches: int, name: str, kind: int | None = None) -> Schedule:
    rows = []
    for rank in range(schedule.ranks):
        table = schedule.table(rank)
        keep = table[:, MICRO_BATCH] < micro_batches
        if kind is not None:
            keep &= table[:, KIND] == kind
        rows.append(kept(table, keep))
    return Schedule.from_rows(
        name,
        rows,
        schedule.rank_of_stage,
        routes=schedule.routes,
        route_of_micro_batch=schedule.route_of_micro_batch[:micro_batches],
        layer_group_of_stage=schedule.layer_group_of_stage,
        micro_batches=micro_batches,
    )

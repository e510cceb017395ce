"""A part of a schedule that is a schedule again: fewer micro-batches, or the forwards alone."""

from __future__ import annotations

import numpy as np

from schedules.action import Kind
from schedules.schedule import Schedule
from schedules.table import KIND, MICRO_BATCH, F, alternate, kept, passes

__all__ = ["forwards_of", "shortened"]


def shortened(schedule: Schedule, micro_batches: int) -> Schedule:
    """The same order without the last micro-batches, for a step whose data ends early.

    Micro-batches do not depend on each other, so what is left of a legal order is legal.
    """
    return schedule if micro_batches == schedule.micro_batches else _kept(schedule, micro_batches, schedule.name)


def forwards_of(schedule: Schedule, micro_batches: int) -> Schedule:
    """The forwards alone, on the same placement: how a model laid out for training is evaluated.

    Where there are two copies of the layers only the first is used, so that all outputs come out at one end, in order.
    """
    if len(schedule.routes) == 1:
        return _kept(schedule, micro_batches, "forward-only", kind=F)
    numbers, route = np.arange(micro_batches), schedule.routes[0]
    rows = []
    for rank in range(schedule.ranks):
        own = [passes(Kind.F, stage, numbers) for stage in route if schedule.rank_of_stage[stage] == rank]
        rows.append(alternate(*own) if own else ())
    return Schedule.from_rows(
        "forward-only",
        rows,
        schedule.rank_of_stage,
        routes=schedule.routes,
        route_of_micro_batch=(0,) * micro_batches,
        layer_group_of_stage=schedule.layer_group_of_stage,
        micro_batches=micro_batches,
    )


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

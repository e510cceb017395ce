"""Predicting: the timeline that a schedule or a program has under given costs."""

from __future__ import annotations

import numpy as np

from schedules.costs import Costs
from schedules.earliest import earliest
from schedules.program import Program
from schedules.schedule import Schedule
from schedules.table import KIND, STAGE
from schedules.timeline import Timeline


def simulate(work: Schedule | Program, costs: Costs | None = None) -> Timeline:
    """Run every entry as soon as its rank and its inputs are there; unit costs unless given.

    A Pair takes as long as its two actions. Raises CostError when costs are given for another number of
    stages, IllegalSchedule or DeadlockError for a schedule that cannot run to its end.
    """
    schedule = work.schedule if isinstance(work, Program) else work
    costs = costs or Costs()
    entries, senders, actions = schedule.entries, schedule.senders, schedule.actions
    seconds = costs.by_kind(schedule.num_stages)[actions[:, KIND], actions[:, STAGE]]
    duration = np.add.reduceat(seconds, entries.first_action) if len(seconds) else seconds
    delay = np.full(senders.shape, costs.hop)
    delay[senders == len(duration)] = 0.0
    times = earliest(entries.starts, senders, delay, duration, schedule.describe)
    for array in times:
        array.setflags(write=False)
    return Timeline(
        schedule,
        "predicted",
        tuple(np.split(times.start, entries.starts[1:-1])),
        tuple(np.split(times.end, entries.starts[1:-1])),
        hop=costs.hop,
    )

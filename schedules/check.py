"""Whether a schedule is complete, legal and can run to its end."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from schedules.action import Action
from schedules.earliest import earliest
from schedules.errors import IllegalSchedule
from schedules.schedule import Schedule
from schedules.table import JOINED, KIND, KINDS, MICRO_BATCH, STAGE, B, F, I, W


def check(schedule: Schedule) -> None:
    """Return if every rank can run its row to the end and every micro-batch is done once by every stage.

    Raises IllegalSchedule for an action that is missing, doubled, on the wrong rank, or before what it needs;
    DeadlockError, with the circle, when ranks wait for each other.
    """
    _check_routes(schedule)
    _check_pairs(schedule)
    _check_ranks(schedule)
    _check_complete(schedule)
    senders = schedule.senders  # refuses an action that runs before what it needs on its own rank
    entries = schedule.entries
    ones = np.ones(len(entries.rank))
    earliest(entries.starts, senders, np.zeros(senders.shape), ones, schedule.describe)


def _check_routes(schedule: Schedule) -> None:
    for number, route in enumerate(schedule.routes):
        if not route or len(set(route)) != len(route):
            raise IllegalSchedule(
                f"{schedule.name}: route {number} is {route}; it must pass one stage or more, each once"
            )


def _check_pairs(schedule: Schedule) -> None:
    for rank in range(schedule.ranks):
        joined = schedule.table(rank)[:, JOINED].astype(bool)
        if joined[-1:].any() or np.any(joined[1:] & joined[:-1]):
            raise IllegalSchedule(f"{schedule.name}: rank {rank} joins an action that is not one of two")


def _check_ranks(schedule: Schedule) -> None:
    runs_on = schedule.rank_of_action
    belongs_to = np.array(schedule.rank_of_stage, dtype=np.intp)[schedule.actions[:, STAGE]]
    wrong = np.flatnonzero(runs_on != belongs_to)
    if wrong.size:
        raise IllegalSchedule(
            f"{schedule.name}: rank {runs_on[wrong[0]]} runs {schedule.action(wrong[0])}, "
            f"but that stage is on rank {belongs_to[wrong[0]]}"
        )


def _check_complete(schedule: Schedule) -> None:
    """One F, and one B or one I and one W, for every micro-batch on every stage of its route."""
    shape = (schedule.num_stages, schedule.micro_batches)
    visits = np.zeros(shape, dtype=np.intp)
    for number, route in enumerate(schedule.routes):
        visits[np.ix_(np.array(route), np.flatnonzero(np.equal(schedule.route_of_micro_batch, number)))] = 1
    times = [_count(schedule, kind) for kind in range(len(KINDS))]
    _compare(schedule, F, times[F], visits)
    if schedule.forward_only:
        return
    split = (times[B] == 0) & (times[I] + times[W] > 0)
    _compare(schedule, B, times[B], np.where(split, 0, visits))
    _compare(schedule, I, times[I], np.where(split, visits, 0))
    _compare(schedule, W, times[W], np.where(split, visits, 0))


def _count(schedule: Schedule, kind: int) -> NDArray[np.intp]:
    chosen = schedule.actions[schedule.actions[:, KIND] == kind]
    flat = chosen[:, STAGE].astype(np.intp) * schedule.micro_batches + chosen[:, MICRO_BATCH]
    counts = np.bincount(flat, minlength=schedule.num_stages * schedule.micro_batches)
    return counts.reshape(schedule.num_stages, schedule.micro_batches)


def _compare(schedule: Schedule, kind: int, times: NDArray[np.intp], wanted: NDArray[np.intp]) -> None:
    wrong = np.argwhere(times != wanted)
    if wrong.size:
        stage, micro_batch = map(int, wrong[0])
        action = Action(stage, KINDS[kind], micro_batch)
        raise IllegalSchedule(
            f"{schedule.name}: {action} runs {_times(times[stage, micro_batch])}, "
            f"it must run {_times(wanted[stage, micro_batch])}"
        )


def _times(number: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(int(number), f"{number} times")

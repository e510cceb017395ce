"""Which needs are messages between ranks, and which are met by the order of a row."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedules.errors import IllegalSchedule
from schedules.needs import MISSING, NOTHING

if TYPE_CHECKING:
    from schedules.schedule import Schedule


class Messages(NamedTuple):
    """Numbers of actions, in the order of the consuming ones; each shape (messages,)."""

    producer: NDArray[np.intp]
    consumer: NDArray[np.intp]


def messages(schedule: Schedule) -> Messages:
    """Every result that an action of one rank takes in from an action of another."""
    source, rank = schedule.needs.source, schedule.rank_of_action
    consumer = np.flatnonzero(source >= 0)
    consumer = consumer[rank[source[consumer]] != rank[consumer]]
    return Messages(source[consumer], consumer)


class Slots(NamedTuple):
    """Where each message stands in a table of shape (messages per entry, entries); each shape (messages,)."""

    line: NDArray[np.intp]
    """1 for what the second action of a Pair takes in, else 0."""
    entry: NDArray[np.intp]


def slots(schedule: Schedule, consumer: NDArray[np.intp]) -> Slots:
    """The place of each message by the action that takes it in."""
    entry = schedule.entries.of_action[consumer]
    second = consumer != schedule.entries.first_action[entry]
    return Slots(second.astype(np.intp), entry)


def senders(schedule: Schedule) -> NDArray[np.intp]:
    """For each entry the entries whose messages it needs; see ``Schedule.senders``."""
    _check_order_of_rows(schedule)
    count = len(schedule.entries.rank)
    producer, consumer = messages(schedule)
    line, entry = slots(schedule, consumer)
    table = np.full((1 + line.max(initial=0), count), count, dtype=np.intp)
    table[line, entry] = schedule.entries.of_action[producer]
    return table


def _check_order_of_rows(schedule: Schedule) -> None:
    """Raise IllegalSchedule unless every action comes after what it needs on its own rank."""
    entry, rank = schedule.entries.of_action, schedule.rank_of_action
    for need in schedule.needs:
        missing = np.flatnonzero(need == MISSING)
        if missing.size:
            raise IllegalSchedule(
                f"{schedule.name}: {schedule.action(missing[0])} needs an action of its own or its neighbouring "
                "stage that no rank runs"
            )
        needing = np.flatnonzero(need != NOTHING)
        needed = need[needing]
        wrong = (rank[needed] == rank[needing]) & (entry[needed] >= entry[needing])
        if wrong.any():
            number = int(needing[np.argmax(wrong)])
            where = "beside" if entry[need[number]] == entry[number] else "before"
            raise IllegalSchedule(
                f"{schedule.name}: rank {rank[number]} runs {schedule.action(number)} {where} "
                f"{schedule.action(need[number])}, which it needs; move it behind"
            )

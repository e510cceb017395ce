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


def senders(schedule: Schedule) -> NDArray[np.intp]:
    """For each entry the entries whose messages it needs; see ``Schedule.senders``."""
    _check_order_of_rows(schedule)
    entries = schedule.entries
    count = len(entries.rank)
    producer, consumer = messages(schedule)
    receiver = entries.of_action[consumer]
    second = consumer != entries.first_action[receiver]  # the second action of a Pair
    table = np.full((2 if second.any() else 1, count), count, dtype=np.intp)
    table[second.astype(np.intp), receiver] = entries.of_action[producer]
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

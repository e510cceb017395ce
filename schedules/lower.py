"""Lowering: from what each rank computes to all that it does, in an order that cannot deadlock.

All entries of all ranks are put in one line, each behind what it needs, and every message is given one place
in it: right behind the entry that makes it. SEND and RECV both stand at that place in their rows. So whoever is
first in the line among all that is unfinished can always go on, even if a send blocks until it is received.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedules.earliest import earliest
from schedules.messages import messages
from schedules.program import ACTION, CODE, OP, PEER, Op, Program
from schedules.prove import prove
from schedules.schedule import Schedule
from schedules.sharing import ALONE, Sharing, gathers
from schedules.table import JOINED, KIND, STAGE, B, F

# At its place in the line, before an entry: the gathering of its parameters. Behind it: its results (two of a Pair),
# sends whose completion it proves, parameters that go, and reductions of stages that it finishes.
GATHER, ENTRY, RESULT, DONE_SENDING, RELEASE, REDUCTION, PLACES = 0, 1, 2, 4, 5, 6, 7

Integers = NDArray[np.intp]


class Mail(NamedTuple):
    """All messages; each field has shape (messages,)."""

    producer: Integers
    """Number of the action that makes the message."""
    consumer: Integers
    """Number of the action that takes it in."""
    source: Integers
    """Rank."""
    destination: Integers
    """Rank."""
    place: Integers
    """Where in the line it is sent and received."""


def lower(schedule: Schedule, sharing: Sharing = ALONE) -> Program:
    """The program of a schedule, proved free of deadlock under sends that block until they are received.

    ``sharing`` says where the program exchanges parameters and gradients with other pipelines, which run the same one:
    they come to these instructions in the same order.

    A send is completed (WAIT_SEND) where a later message from its receiver shows that it has arrived, so that
    the wait costs nothing; where no such message follows, before the step. A program without backward has
    neither reductions nor a step.
    """
    line = _line(schedule)
    mail = _mail(schedule, line)
    rows = _rows(schedule, line, mail, _end_of_sends(schedule, mail, line), sharing)
    program = Program(
        schedule,
        np.concatenate(rows),
        (0, *np.cumsum([len(row) for row in rows]).tolist()),
    )
    prove(program)
    return program


def _line(schedule: Schedule) -> Integers:
    """The place of every entry: by start time if all passes took the same time, then by rank."""
    entries, senders = schedule.entries, schedule.senders
    passes = np.bincount(entries.of_action, weights=1.0 + (schedule.actions[:, KIND] == B)).astype(np.float64)
    start, _ = earliest(entries.starts, senders, np.zeros(senders.shape), passes, schedule.describe)
    place = np.empty(len(start), dtype=np.intp)
    place[np.lexsort((entries.rank, start))] = np.arange(len(start)) * PLACES + ENTRY
    return place


def _mail(schedule: Schedule, line: Integers) -> Mail:
    """The messages in the order of the line."""
    entries = schedule.entries
    producer, consumer = messages(schedule)
    entry = entries.of_action[producer]
    place = line[entry] + RESULT - ENTRY + (producer - entries.first_action[entry])
    order = np.argsort(place)
    producer, consumer, place = producer[order], consumer[order], place[order]
    rank = schedule.rank_of_action
    return Mail(producer, consumer, rank[producer], rank[consumer], place)


def _end_of_sends(schedule: Schedule, mail: Mail, line: Integers) -> Integers:
    """Where each send is known to be complete; behind everything where nothing shows it.

    What rank q sends back at or after the entry that took a message in shows, when it has arrived, that the
    message had.
    """
    of_action = schedule.entries.of_action
    end = np.full(len(mail.place), _behind_all(line))
    channels = _by_key(mail.source * schedule.ranks + mail.destination)
    for channel, sent in channels.items():
        source, destination = divmod(channel, schedule.ranks)
        replies = channels.get(destination * schedule.ranks + source)
        if replies is None:
            continue
        made_by = of_action[mail.producer[replies]]
        taken_in = line[of_action[mail.consumer[replies]]]
        soonest = np.minimum.accumulate(taken_in[::-1])[::-1]  # by any reply from this one on
        reply = np.searchsorted(made_by, of_action[mail.consumer[sent]])
        shown = reply < len(replies)
        end[sent[shown]] = soonest[reply[shown]] + DONE_SENDING - ENTRY
    return end


def _rows(
    schedule: Schedule, line: Integers, mail: Mail, end_of_send: Integers, sharing: Sharing
) -> list[NDArray[np.int32]]:
    """The table of every rank."""
    actions, entries = schedule.actions, schedule.entries
    kind = actions[:, KIND]
    forward = kind[mail.producer] == F
    entry_op = np.where(actions[entries.first_action, JOINED], CODE[Op.PAIR], kind[entries.first_action])
    send = np.where(forward, CODE[Op.SEND_F], CODE[Op.SEND_B])
    receive = np.where(forward, CODE[Op.RECV_F], CODE[Op.RECV_B])
    sent_by, received_by = _by_key(mail.source), _by_key(mail.destination)
    behind_all = _behind_all(line)

    rows = []
    none = np.zeros(0, dtype=np.intp)
    for rank in range(schedule.ranks):
        own = slice(*entries.starts[rank : rank + 2])
        sent, received = sent_by.get(rank, none), received_by.get(rank, none)
        items = [
            _items(line[own], entry_op[own], entries.first_action[own]),
            _items(mail.place[sent], send[sent], mail.producer[sent], mail.destination[sent]),
            _items(mail.place[received], receive[received], mail.consumer[received], mail.source[received]),
            _items(end_of_send[sent], CODE[Op.WAIT_SEND], mail.producer[sent], mail.destination[sent]),
        ]
        items += _gathers(schedule, line[own], rank, sharing)
        if not schedule.forward_only:
            items.append(_items(*_reductions(schedule, line, rank, sharing)))
            items.append(_items(np.array([behind_all + 1]), CODE[Op.STEP], -1))
        row = np.concatenate(items)
        rows.append(row[np.argsort(row[:, 0], kind="stable"), 1:].astype(np.int32))
    return rows


def _items(place: Integers, op: Integers | int, number: Integers | int, peer: Integers | int = -1) -> Integers:
    """Lines of a program's table with their places in front."""
    items = np.empty((len(place), 4), dtype=np.intp)
    items[:, 0] = place
    items[:, 1 + OP] = op
    items[:, 1 + ACTION] = number
    items[:, 1 + PEER] = peer
    return items


def _gathers(schedule: Schedule, line: Integers, rank: int, sharing: Sharing) -> list[Integers]:
    """UNSHARD and RESHARD of a rank, whose entries have these places in the line."""
    if sharing.gather == "never" or not len(line):
        return []
    if sharing.gather == "step":  # in the order of first use; nothing of a step comes before
        used = list(dict.fromkeys(schedule.table(rank)[:, STAGE].tolist()))
        return [_items(np.full(len(used), line[0] - ENTRY + GATHER), CODE[Op.UNSHARD], np.array(used))]
    found = np.array(list(gathers(schedule.rows[rank], sharing)), dtype=np.intp).reshape(-1, 3)
    entry, stage, comes = found.T
    place = line[entry] - ENTRY + np.where(comes, GATHER, RELEASE)
    return [_items(place, np.where(comes, CODE[Op.UNSHARD], CODE[Op.RESHARD]), stage)]


def _reductions(schedule: Schedule, line: Integers, rank: int, sharing: Sharing) -> tuple[Integers, int, Integers]:
    """REDUCE_GRAD of a rank: behind every B, I and W, or behind the last of each stage."""
    table = schedule.table(rank)
    adding = np.flatnonzero(table[:, KIND] != F)
    place = line[schedule.entries.of_action[schedule.row_starts[rank] + adding]] + REDUCTION - ENTRY
    stage = table[adding, STAGE]
    if sharing.reduce == "step":
        stages = np.array(schedule.stages_of_rank(rank), dtype=np.intp)
        last = np.zeros(schedule.num_stages, dtype=np.intp)
        np.maximum.at(last, stage, place)
        place, stage = last[stages], stages
    return place, CODE[Op.REDUCE_GRAD], stage


def _behind_all(line: Integers) -> int:
    return len(line) * PLACES


def _by_key(keys: Integers) -> dict[int, Integers]:
    """The positions of each key, in order."""
    order = np.argsort(keys, kind="stable")
    found, begins = np.unique(keys[order], return_index=True)
    ends = [*begins[1:].tolist(), len(keys)][: len(found)]
    return {key: order[begin:end] for key, begin, end in zip(found.tolist(), begins, ends, strict=True)}

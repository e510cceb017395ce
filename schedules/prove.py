"""The proof that a program runs to its end; it reads finished rows and knows nothing of how they were made."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedules.earliest import earliest
from schedules.errors import IllegalProgram
from schedules.messages import messages
from schedules.program import ACTION, CODE, OP, PASSES, PEER, Op, Program, describe
from schedules.table import JOINED, KIND, F

Integers = NDArray[np.intp]

SENDS = (CODE[Op.SEND_F], CODE[Op.SEND_B])
RECEIVES = (CODE[Op.RECV_F], CODE[Op.RECV_B])


class Transfers(NamedTuple):
    """Instructions that belong together, by number; each shape (messages,)."""

    send: Integers
    receive: Integers


def prove(program: Program, depth: int = 0) -> None:
    """Return if the program ends even where a SEND blocks until its RECV is posted, and a RECV until it is sent.

    Messages between two ranks arrive in the order of sending, one order for forwards and one for backwards. A
    rank that has come to one RECV has posted the next ``depth`` as well. Raises IllegalProgram when a row
    does not do what its schedule says or a channel would deliver the wrong message; DeadlockError, with the
    circle, when ranks wait for each other.
    """
    rank = np.repeat(np.arange(program.schedule.ranks), np.diff(program.row_starts))
    _check_passes(program)
    transfers = _match(program, rank)
    _check_places(program, transfers)
    if depth or not _all_meet(program.schedule.ranks, rank, transfers):
        _run(program, rank, transfers, depth)


def _check_passes(program: Program) -> None:
    """Every row runs the entries of its schedule, in their order."""
    actions, entries = program.schedule.actions, program.schedule.entries
    runs = np.flatnonzero(np.isin(program.instructions[:, OP], PASSES))
    first = actions[entries.first_action]
    same = (
        np.array_equal(np.searchsorted(runs, program.row_starts), entries.starts)
        and np.array_equal(program.instructions[runs, ACTION], entries.first_action)
        and np.array_equal(program.instructions[runs, OP], np.where(first[:, JOINED], CODE[Op.PAIR], first[:, KIND]))
    )
    if not same:
        raise IllegalProgram(f"the program's passes are not those of {program.schedule.name} in the order of its rows")


def _match(program: Program, rank: Integers) -> Transfers:
    """Join the k-th SEND of every channel with its k-th RECV, and hold them against the schedule's needs."""
    code, number, peer = (program.instructions[:, column] for column in (OP, ACTION, PEER))
    send, receive = np.flatnonzero(np.isin(code, SENDS)), np.flatnonzero(np.isin(code, RECEIVES))
    ranks = program.schedule.ranks
    sent_on = (rank[send] * ranks + peer[send]) * 2 + (code[send] == SENDS[0])
    received_on = (peer[receive] * ranks + rank[receive]) * 2 + (code[receive] == RECEIVES[0])
    by_send, by_receive = np.argsort(sent_on, kind="stable"), np.argsort(received_on, kind="stable")
    if not np.array_equal(sent_on[by_send], received_on[by_receive]):
        raise IllegalProgram("some channel has more sends than receives, or more receives than sends")
    send, receive = send[by_send], receive[by_receive]

    for instructions in (send, receive):
        elsewhere = np.flatnonzero(program.schedule.rank_of_action[number[instructions]] != rank[instructions])
        if elsewhere.size:
            name = describe(program, int(instructions[elsewhere[0]]))
            raise IllegalProgram(f"{name} is for an action that another rank runs")
    wanted = messages(program.schedule)
    wrong = np.flatnonzero(program.schedule.needs.source[number[receive]] != number[send])
    if wrong.size:
        sent, taken = describe(program, int(send[wrong[0]])), describe(program, int(receive[wrong[0]]))
        raise IllegalProgram(f"a channel delivers the wrong message: {sent} meets {taken}")
    if not np.array_equal(np.sort(number[receive]), wanted.consumer):
        raise IllegalProgram("some message of the schedule is not sent, or is sent twice")
    forward = program.schedule.actions[number[send], KIND] == F
    if not np.array_equal(forward, code[send] == SENDS[0]):
        raise IllegalProgram("some message travels in the lane of the other direction")
    return Transfers(send, receive)


def _check_places(program: Program, transfers: Transfers) -> None:
    """Results are sent after they are made and received before they are needed; every send is completed."""
    code, number = program.instructions[:, OP], program.instructions[:, ACTION]
    entry_of = program.schedule.entries.of_action
    pass_of = np.flatnonzero(np.isin(code, PASSES))  # by entry
    for instructions, after in ((transfers.send, True), (transfers.receive, False)):
        wrong = (instructions < pass_of[entry_of[number[instructions]]]) == after
        if wrong.any():
            where = "before its result is made" if after else "after its message is needed"
            raise IllegalProgram(f"{describe(program, int(instructions[np.argmax(wrong)]))} stands {where}")
    waits = np.flatnonzero(code == CODE[Op.WAIT_SEND])
    sends = np.sort(transfers.send)
    by_wait, by_send = np.argsort(number[waits]), np.argsort(number[sends])
    if not np.array_equal(number[waits][by_wait], number[sends][by_send]) or np.any(waits[by_wait] < sends[by_send]):
        raise IllegalProgram("some send is not completed by one WAIT_SEND behind it")


def _all_meet(ranks: int, rank: Integers, transfers: Transfers) -> bool:
    """Whether all messages come about where each is a meeting of its two ranks: what ``_run`` says for depth 0, in a
    fraction of the time, since passes make nobody wait for another rank and a meeting is one node and not two."""
    count = len(transfers.send)
    instructions = np.concatenate([transfers.send, transfers.receive])
    order = np.argsort(instructions)
    own = rank[instructions][order]
    starts = np.searchsorted(own, np.arange(ranks + 1))
    # Row after row the messages of a rank and whom it meets; behind each row a place where nobody ever meets.
    message, other = (
        np.insert(values[order], starts[1:], ends)
        for values, ends in (
            (np.tile(np.arange(count), 2), count + np.arange(ranks)),
            (rank[np.concatenate([transfers.receive, transfers.send])], (np.arange(ranks) + 1) % ranks),
        )
    )
    at, ends = starts[:-1] + np.arange(ranks), starts[1:] + np.arange(ranks)
    before = -1
    while before != (before := int(at.sum())):
        for _ in range(min(_MEETINGS, count)):
            now = message[at]
            at += now == now[other[at]]
    return bool((at == ends).all())


_MEETINGS = 64  # rounds between two looks at whether anybody still goes on


def _run(program: Program, rank: Integers, transfers: Transfers, depth: int) -> None:
    """Go through all rows at once; the circle is named if that stops anywhere."""
    count = len(rank)
    row_starts = np.array(program.row_starts, dtype=np.intp)
    # To have come to an instruction is to have finished the one before it, if there is one in the row.
    before = np.arange(count, dtype=np.intp) - 1
    before[np.isin(np.arange(count), row_starts[:-1])] = count
    waits_for = np.full((1, count), count, dtype=np.intp)
    waits_for[0, transfers.receive] = before[transfers.send]
    waits_for[0, transfers.send] = before[_posted_at(rank, transfers.receive, depth, row_starts)]
    earliest(
        row_starts,
        waits_for,
        np.zeros((1, count)),
        np.ones(count),
        lambda instruction: describe(program, instruction),
    )


def _posted_at(rank: Integers, receives: Integers, depth: int, starts: Integers) -> Integers:
    """The instruction at which each receive is posted: the one ``depth`` receives before it, or the row's first."""
    in_order = np.sort(receives)
    earlier = np.searchsorted(in_order, receives) - depth
    posted = in_order[np.maximum(earlier, 0)]
    return np.where((earlier >= 0) & (rank[posted] == rank[receives]), posted, starts[rank[receives]])

"""The program: what each rank does, a schedule's row with messages, reductions and the step put in."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedules.action import Action, Kind, Pair, actions_of
from schedules.messages import messages
from schedules.schedule import Schedule

Lane = Literal["F", "B"]
"""Messages of forwards and of backwards between two ranks travel in lanes of their own, each in order."""


class Op(enum.StrEnum):
    """What an instruction does."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - the field's own letter
    W = "W"
    PAIR = "PAIR"
    SEND_F = "SEND_F"  # start to send an output forward
    RECV_F = "RECV_F"  # start to receive one; the action that takes it in completes the transfer
    SEND_B = "SEND_B"  # the same for gradients, backward
    RECV_B = "RECV_B"
    WAIT_SEND = "WAIT_SEND"  # complete a send and let its tensor go
    UNSHARD = "UNSHARD"  # make a stage's parameters whole
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"  # all gradients of a stage are there: add them up over its replicas
    STEP = "STEP"  # the optimizer's step


class Instruction(NamedTuple):
    """One instruction. ``action`` is the pass that is run, whose result is sent, or that a message is for.

    ``peer`` is the destination of a SEND and the source of a RECV, ``stage`` the subject of REDUCE_GRAD.
    """

    op: Op
    action: Action | Pair | None = None
    peer: int = -1
    stage: int = -1

    def __str__(self) -> str:
        match self.op:
            case Op.SEND_F | Op.SEND_B:
                return f"{self.op} {self.action} to {self.peer}"
            case Op.RECV_F | Op.RECV_B:
                return f"{self.op} {self.action} from {self.peer}"
            case Op.WAIT_SEND:
                return f"{self.op} {self.action}"
            case Op.UNSHARD | Op.RESHARD | Op.REDUCE_GRAD:
                return f"{self.op} {self.stage}"
            case Op.STEP:
                return str(self.op)
            case _:
                return str(self.action)


OPS = tuple(Op)
CODE = {op: code for code, op in enumerate(OPS)}  # those of passes are the codes of their kinds
PASSES = tuple(CODE[op] for op in (Op.F, Op.B, Op.I, Op.W, Op.PAIR))
OP, ACTION, PEER = range(3)
"""Columns of a program's table: code of the Op, number of the action (or of the stage), rank of the peer."""


@dataclass(frozen=True, eq=False)
class Program:
    """One row of instructions a rank; made by ``lower``, which proves that it cannot deadlock.

    Rows are integers inside (``instructions``); ``rows`` and ``messages`` make objects of them when asked.
    """

    schedule: Schedule
    instructions: NDArray[np.int32] = field(repr=False)
    """All rows one after the other, shape (instructions, 3)."""
    row_starts: tuple[int, ...] = field(repr=False)

    def __post_init__(self) -> None:
        self.instructions.setflags(write=False)

    def table(self, rank: int) -> NDArray[np.int32]:
        """The row of a rank in integers: a view of ``instructions``."""
        return self.instructions[self.row_starts[rank] : self.row_starts[rank + 1]]

    @cached_property
    def rows(self) -> tuple[tuple[Instruction, ...], ...]:
        """One tuple of instructions a rank, in the order in which the rank goes through them."""
        action = _all_actions(self.schedule).__getitem__
        return tuple(
            tuple(_instruction(OPS[op], number, peer, action) for op, number, peer in self.table(rank).tolist())
            for rank in range(self.schedule.ranks)
        )

    @cached_property
    def messages(self) -> dict[tuple[int, int], tuple[tuple[Action, Action], ...]]:
        """By (source, destination) rank: who makes and who takes in each message, in the order of sending."""
        actions = _all_actions(self.schedule)
        consumer_of = dict(zip(*(numbers.tolist() for numbers in messages(self.schedule)), strict=True))
        sent: dict[tuple[int, int], list[tuple[Action, Action]]] = {}
        for rank in range(self.schedule.ranks):
            row = self.table(rank)
            for _, number, peer in row[np.isin(row[:, OP], (CODE[Op.SEND_F], CODE[Op.SEND_B]))].tolist():
                message = actions[number], actions[consumer_of[number]]
                sent.setdefault((rank, peer), []).append(message)
        return {channel: tuple(pairs) for channel, pairs in sorted(sent.items())}

    @staticmethod
    def from_csv(path: str | os.PathLike[str], *, name: str | None = None, depth: int = 0) -> Program:
        """Read torch's form with communication, and prove what was read; see ``schedules.interchange``."""
        from schedules.interchange import program_from_csv

        return program_from_csv(path, name=name, depth=depth)

    def lane(self, source: int, destination: int, lane: Lane) -> tuple[tuple[Action, Action], ...]:
        """The messages from one rank to another that travel in one lane, in the order of sending."""
        return tuple(
            message
            for message in self.messages.get((source, destination), ())
            if (message[0].kind is Kind.F) == (lane == "F")
        )


def describe(program: Program, number: int) -> str:
    """An instruction for messages: "rank 2's RECV_F 2F5 from 1"."""
    rank = int(np.searchsorted(program.row_starts, number, side="right")) - 1
    op, subject, peer = program.instructions[number].tolist()
    return f"rank {rank}'s {_instruction(OPS[op], subject, peer, program.schedule.action)}"


def _all_actions(schedule: Schedule) -> list[Action]:
    """The objects of all actions, by number."""
    return [action for row in schedule.rows for entry in row for action in actions_of(entry)]


def _instruction(op: Op, number: int, peer: int, action: Callable[[int], Action]) -> Instruction:
    match op:
        case Op.STEP:
            return Instruction(op)
        case Op.UNSHARD | Op.RESHARD | Op.REDUCE_GRAD:
            return Instruction(op, stage=number)
        case Op.PAIR:
            return Instruction(op, Pair(action(number), action(number + 1)))
        case _:
            return Instruction(op, action(number), peer)

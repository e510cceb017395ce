"""Schedules and programs as CSV files in the forms of torch.distributed.pipelining and torchtitan.

One line a rank, one cell an action in the order of execution: ``0F0,0F1,(0F2;1B0)OVERLAP_F_B,0W1``. torch leaves cells
empty where it expects a bubble, and its other form has communication in between: ``0UNSHARD,0F0,0SEND_F0``. A schedule
is read from either, since bubbles follow from costs and communication from the schedule. A program is read from the
form with communication, which is then kept as it stands, and proved.
"""

from __future__ import annotations

import csv
import os
import re
from pathlib import Path

import numpy as np

from schedules.action import Entry, Kind, actions_of, parse_entry
from schedules.check import check
from schedules.errors import UnreadableSchedule
from schedules.program import CODE, OPS, Op, Program
from schedules.prove import prove
from schedules.schedule import Schedule
from schedules.table import JOINED, KIND, F, W

_BESIDE = re.compile(r"(\d+)(?:(SEND_F|RECV_F|SEND_B|RECV_B)(\d+)|(UNSHARD|RESHARD|REDUCE_GRAD))")


def to_csv(schedule: Schedule, path: str | os.PathLike[str]) -> None:
    """Write one line a rank. Routes and layer groups are not written: ``from_csv`` finds them in the rows."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(map(str, row) for row in schedule.rows)


def from_csv(path: str | os.PathLike[str], *, name: str | None = None) -> Schedule:
    """Read one line a rank and check the schedule.

    Stages are where the rows run them. Micro-batches that visit other stages than the rest take a route of
    their own, each route in increasing order of its stages; stages at the same place of their routes are
    copies.
    """
    rows = [
        [_entry(cell, line, column) for column, cell in enumerate(cells, start=1) if _is_computed(cell)]
        for line, cells in enumerate(_lines(path), start=1)
    ]
    if not rows:
        raise UnreadableSchedule(f"{path} has no action in it; it must have one line a rank, such as 0F0,0B0")
    rank_of_stage = _placement(rows, path)
    routes = _routes(rows, len(rank_of_stage))
    group = {stage: place for route in routes for place, stage in enumerate(route)}
    schedule = Schedule.from_rows(
        Path(path).stem if name is None else name,
        rows,
        rank_of_stage,
        routes=routes,
        layer_group_of_stage=[group[stage] for stage in range(len(rank_of_stage))],
    )
    check(schedule)
    return schedule


def program_from_csv(path: str | os.PathLike[str], *, name: str | None = None, depth: int = 0) -> Program:
    """Read the form with communication, keep its order and prove it; see ``prove`` for ``depth``.

    The file ends where torch's own step does, so reductions that it leaves out, the completion of its sends and the
    optimizer's step are put at the end of each row. Raises UnreadableSchedule, IllegalSchedule, IllegalProgram or
    DeadlockError.
    """
    schedule = from_csv(path, name=name)
    numbers, rows = _numbers(schedule), []
    for rank, cells in enumerate(_lines(path)):
        passes = iter(schedule.entries.first_action[slice(*schedule.entries.starts[rank : rank + 2])].tolist())
        row = []
        for column, cell in enumerate(cells, start=1):
            if _is_computed(cell):
                number = next(passes)
                row.append((_op_of_pass(schedule, number), number, -1))
            elif cell.strip():
                row.append(_beside(schedule, numbers, cell.strip(), f"line {rank + 1}, column {column}"))
        rows.append([*row, *_end_of_row(schedule, rank, row)])
    program = Program(
        schedule,
        np.array([line for row in rows for line in row], dtype=np.int32).reshape(-1, 3),
        (0, *np.cumsum([len(row) for row in rows]).tolist()),
    )
    prove(program, depth)
    return program


def _lines(path: str | os.PathLike[str]) -> list[list[str]]:
    """The cells of each line; empty lines at the end are not ranks."""
    with open(path, newline="", encoding="utf-8") as file:
        lines = list(csv.reader(file))
    while lines and not any(map(_is_computed, lines[-1])):
        lines.pop()
    return lines


def _is_computed(cell: str) -> bool:
    return bool(cell.strip()) and _BESIDE.fullmatch(cell.strip()) is None


def _entry(cell: str, line: int, column: int) -> Entry:
    try:
        return parse_entry(cell)
    except UnreadableSchedule as error:
        raise UnreadableSchedule(f"line {line}, column {column}: {error}") from None


def _placement(rows: list[list[Entry]], path: str | os.PathLike[str]) -> list[int]:
    """The rank of every stage: the first whose row runs it."""
    owner: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for entry in row:
            for action in actions_of(entry):
                owner.setdefault(action.stage, rank)
    missing = sorted(set(range(max(owner) + 1)) - set(owner))
    if missing:
        raise UnreadableSchedule(f"{path}: stage {missing[0]} is on no line; stages are numbered from 0 on")
    return [owner[stage] for stage in range(len(owner))]


def _routes(rows: list[list[Entry]], stages: int) -> list[tuple[int, ...]]:
    """The sets of stages that micro-batches visit, if they are apart; else one route through all stages."""
    visited: dict[int, set[int]] = {}
    for row in rows:
        for entry in row:
            for action in actions_of(entry):
                if action.kind is Kind.F:
                    visited.setdefault(action.micro_batch, set()).add(action.stage)
    routes = list(dict.fromkeys(tuple(sorted(visited[number])) for number in sorted(visited)))
    times = np.bincount([stage for route in routes for stage in route], minlength=stages)
    return routes if np.all(times == 1) else [tuple(range(stages))]


_Line = tuple[int, int, int]
"""Of a program's table: code of the Op, number of the action or the stage, rank of the peer."""

_Numbers = dict[tuple[int, bool, int], int]
"""The number of an action by its stage, whether it is a forward, and its micro-batch."""


def _op_of_pass(schedule: Schedule, number: int) -> int:
    kind, is_pair = schedule.actions[number, KIND], schedule.actions[number, JOINED]
    return CODE[Op.PAIR] if is_pair else int(kind)


def _beside(schedule: Schedule, numbers: _Numbers, cell: str, where: str) -> _Line:
    """What stands between passes: ``2SEND_F0``, ``1RECV_B3``, ``0UNSHARD``."""
    match = _BESIDE.fullmatch(cell)
    if match is None:
        raise UnreadableSchedule(f"{where}: {cell!r} is neither a pass nor communication")
    stage, transfer, micro_batch, collective = match.groups()
    if collective:
        return CODE[Op(collective)], int(stage), -1
    op = Op(transfer)
    number = numbers.get((int(stage), op in (Op.SEND_F, Op.RECV_F), int(micro_batch)))
    peer = None
    if number is not None:
        other = schedule.next_stage if op in (Op.SEND_F, Op.RECV_B) else schedule.previous_stage
        peer = other(int(stage), int(micro_batch))
    if number is None or peer is None:
        raise UnreadableSchedule(f"{where}: nothing is there that {cell} could send or receive")
    return CODE[op], number, schedule.rank_of_stage[peer]


def _numbers(schedule: Schedule) -> _Numbers:
    """The number of the F, and of the B or I, of each stage and micro-batch."""
    chosen = np.flatnonzero(schedule.actions[:, KIND] != W)
    stage, kind, micro_batch, _ = schedule.actions[chosen].T
    columns = (stage.tolist(), (kind == F).tolist(), micro_batch.tolist())
    return dict(zip(zip(*columns, strict=True), chosen.tolist(), strict=True))


def _end_of_row(schedule: Schedule, rank: int, row: list[_Line]) -> list[_Line]:
    """Reductions that are missing, the completion of all sends, and the step."""
    sends = [(CODE[Op.WAIT_SEND], number, peer) for op, number, peer in row if OPS[op] in (Op.SEND_F, Op.SEND_B)]
    if schedule.forward_only:
        return sends
    reduced = {number for op, number, _ in row if OPS[op] is Op.REDUCE_GRAD}
    missing = [(CODE[Op.REDUCE_GRAD], one, -1) for one in schedule.stages_of_rank(rank) if one not in reduced]
    return [*missing, *sends, (CODE[Op.STEP], -1, -1)]

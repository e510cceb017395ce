"""Schedules as CSV files in the compute-only form of torch.distributed.pipelining and torchtitan.

One line a rank, one cell an action in the order of execution: ``0F0,0F1,(0F2;1B0)OVERLAP_F_B,0W1``. torch
leaves cells empty where it expects a bubble, and its other form has communication in between; reading skips
both, since bubbles follow from costs and communication from the schedule.
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
from schedules.schedule import Schedule

_COMMUNICATION = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*")


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
    with open(path, newline="", encoding="utf-8") as file:
        rows = [
            [_entry(cell, line, column) for column, cell in enumerate(cells, start=1) if _is_computed(cell)]
            for line, cells in enumerate(csv.reader(file), start=1)
        ]
    while rows and not rows[-1]:
        rows.pop()  # empty lines at the end are not ranks
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


def _is_computed(cell: str) -> bool:
    return bool(cell.strip()) and _COMMUNICATION.fullmatch(cell.strip()) is None


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

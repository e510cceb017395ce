"""The integer form of a row, which schedules store and schedule functions compose.

A table has one line per action and four columns: stage, kind (a code), micro-batch, and 1 where the action
runs as one instruction with the next. Composing tables keeps a schedule function as short as its description
and fast at thousands of ranks and micro-batches:

    warm, first = passes(Kind.F, stage, range(0, w)), passes(Kind.F, stage, range(w, m))
    in_order(warm, alternate(first, backwards[: m - w]), backwards[m - w :])
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from schedules.action import Action, Entry, Kind, Pair, actions_of

Table = NDArray[np.int32]
Row = Table | Iterable[Entry]
"""A rank's row as a schedule function may give it: a table, or actions one after the other."""

STAGE, KIND, MICRO_BATCH, JOINED = range(4)
KINDS = tuple(Kind)
F, B, I, W = range(4)  # noqa: E741 - the codes of KINDS, by the same letters


def passes(kind: Kind, stage: int | Sequence[int] | NDArray[np.integer], micro_batches: object) -> Table:
    """A table of passes of one kind; ``stage`` and ``micro_batches`` are broadcast against each other."""
    stages, numbers = np.broadcast_arrays(np.asarray(stage), np.asarray(micro_batches))
    table = np.zeros((numbers.size, 4), dtype=np.int32)
    table[:, STAGE] = stages.ravel()
    table[:, KIND] = KINDS.index(kind)
    table[:, MICRO_BATCH] = numbers.ravel()
    return table


def alternate(*tables: Table) -> Table:
    """first[0], second[0], ..., first[1], second[1], ...; all must have the same length."""
    return np.stack(tables, axis=1).reshape(-1, 4)


def by_slot(*parts: tuple[Table, NDArray[np.integer]]) -> Table:
    """The lines of all tables in the order of the slots they are given, a number each; of equal ones, as given."""
    order = np.argsort(np.concatenate([slots for _, slots in parts]), kind="stable")
    return in_order(*(table for table, _ in parts))[order]


def joined(table: Table) -> Table:
    """The same lines, each of them run as one instruction with whatever comes next."""
    pairs = table.copy()
    pairs[:, JOINED] = 1
    return pairs


def in_order(*tables: Table) -> Table:
    """One table after the other."""
    return np.concatenate(tables) if tables else np.zeros((0, 4), dtype=np.int32)


def kept(table: Table, keep: NDArray[np.bool_]) -> Table:
    """The lines of a row that are to be kept; an action whose partner in a pair is left out stands alone."""
    with_next = table[:, JOINED].astype(bool)
    with_next[:-1] &= keep[1:]
    lines = table[keep].copy()
    lines[:, JOINED] = with_next[keep]
    return lines


def as_table(row: Row) -> Table:
    """The table of a row, given in either form."""
    if isinstance(row, np.ndarray):
        return row.astype(np.int32, copy=False).reshape(-1, 4)
    lines = [
        (action.stage, _CODES[action.kind], action.micro_batch, int(position < len(group) - 1))
        for group in map(actions_of, row)
        for position, action in enumerate(group)
    ]
    return np.array(lines, dtype=np.int32).reshape(-1, 4)


def as_entries(table: Table) -> tuple[Entry, ...]:
    """The row of a table as Action and Pair objects."""
    entries: list[Entry] = []
    waiting: Action | None = None
    for stage, kind, micro_batch, joined in table.tolist():
        action = Action(stage, KINDS[kind], micro_batch)
        if joined:
            waiting = action
        elif waiting is not None:
            entries.append(Pair(waiting, action))
            waiting = None
        else:
            entries.append(action)
    return tuple(entries)


_CODES = {kind: code for code, kind in enumerate(KINDS)}

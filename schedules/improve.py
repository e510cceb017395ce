"""Improving an order: passes on the critical path change places, as in the tabu search for job shops.

While no pass on a longest path moves, the step cannot become shorter; and of a block, passes that follow each other on
one rank along that path, something has to come before its first or behind its last (Nowicki and Smutnicki 1996, Balas
and Vazacopoulos 1998). Such moves are tried until one does not make the step longer. Where none does, the least bad one
is made, and for some time no move leads back.
"""

from __future__ import annotations

import random
from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

from schedules.critical import Block, Network, Rows, Times, critical_blocks, times
from schedules.greedy import EPSILON

FARTHEST = 12
"""A pass overtakes no more than this many at once."""

PATIENCE = 200
"""After this many moves without a shorter step, the search goes back to the best rows."""


def improve(network: Network, rows: Rows, cap: Sequence[float], tries: int) -> Rows:
    """The best rows found by timing ``tries`` changed ones. The same on every day.

    ``cap`` has one number a rank, as in ``schedules.greedy.arrange``; rows that do not keep to it are not tried.
    """
    now = times(network, rows)
    if now is None:
        return rows
    chance = random.Random(0)
    best, best_rows, best_move = now, rows, 0
    undoing: dict[_Change, int] = {}  # until which move each change is not to be made
    move = 0
    while tries > 0:
        move += 1
        choice, tried = _choose(network, rows, now, cap, chance, undoing)
        tries -= max(tried, 1)
        if choice is None or move - best_move > PATIENCE:
            rows, now, best_move = best_rows, best, move
            continue
        change, now = choice
        undoing[change.undone(rows)] = move + chance.randint(8, 20)
        undoing = {change: until for change, until in undoing.items() if until > move}
        rows = change.applied(rows)
        if now.score < best.score - EPSILON:
            best, best_rows, best_move = now, rows, move
    return best_rows


class _Change(NamedTuple):
    """A part of a row in another order."""

    rank: int
    at: int
    passes: tuple[int, ...]

    def applied(self, rows: Rows) -> Rows:
        changed, row = list(rows), rows[self.rank]
        changed[self.rank] = [*row[: self.at], *self.passes, *row[self.at + len(self.passes) :]]
        return changed

    def undone(self, rows: Rows) -> _Change:
        return _Change(self.rank, self.at, tuple(rows[self.rank][self.at : self.at + len(self.passes)]))


def _choose(
    network: Network,
    rows: Rows,
    now: Times,
    cap: Sequence[float],
    chance: random.Random,
    forbidden: Container[_Change],
) -> tuple[tuple[_Change, Times] | None, int]:
    """The first change that does not make the step longer, else the least bad; and how many were timed."""
    changes = [
        change for block in critical_blocks(network, rows, now, chance) for change in _changes(network, rows, block)
    ]
    chance.shuffle(changes)
    choice, tried = None, 0
    for change in changes:
        if change in forbidden:
            continue
        changed = change.applied(rows)
        if not _fits(network, changed[change.rank], cap[change.rank], change.at + len(change.passes)):
            continue
        found = times(network, changed)
        tried += 1
        if found is not None and (choice is None or found.score < choice[1].score):
            choice = change, found
            if found.score <= now.score + EPSILON:
                break
    return choice, tried


def _changes(network: Network, rows: Rows, block: Block) -> Iterator[_Change]:
    """Every pass of a block before the first one or behind the last one, as far as it may overtake the others."""
    row, (rank, first, last) = rows[block.rank], block
    for at in range(first, last + 1):
        before, number, behind = row[first:at], row[at], row[at + 1 : last + 1]
        if 0 < len(before) <= FARTHEST and not any(one in network.before[number] for one in before):
            yield _Change(rank, first, (number, *before))
        if 0 < len(behind) <= FARTHEST and not any(number in network.before[one] for one in behind):
            yield _Change(rank, at, (*behind, number))


def _fits(network: Network, row: Sequence[int], cap: float, end: int) -> bool:
    """Whether the first passes of a row keep to the memory."""
    held = 0.0
    for number in row[:end]:
        held += network.change[number]
        if held > cap + EPSILON:
            return False
    return True

"""Improving an order: passes on the critical path change places, as in the tabu search for job shops.

While no pass on a longest path moves, the step cannot become shorter; and of a block, passes that follow each other on
one rank along that path, something has to come before its first or behind its last (Nowicki and Smutnicki 1996, Balas
and Vazacopoulos 1998). How long the step becomes by such a move is estimated from the times before and behind the
passes that move; the most promising moves are timed, and the best is made, also if it makes the step longer. For some
time no move leads back.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from schedules.critical import Block, Network, Rows, Times, critical_blocks, tails, times
from schedules.greedy import EPSILON

FARTHEST = 12
"""A pass overtakes no more than this many at once."""

PATIENCE = 100
"""After this many moves without a shorter step, the search goes back to the best rows."""

TIMED = 3
"""So many of the moves that look best are timed, until one does not make the step longer."""


def improve(network: Network, rows: Rows, cap: Sequence[float], tries: int, bound: float = 0.0) -> Rows:
    """The best rows found by timing ``tries`` changed ones, fewer if ``bound`` is met. The same on every day.

    ``cap`` has one number a rank, as in ``schedules.greedy.arrange``; rows that do not keep to it are not tried.
    """
    now = times(network, rows)
    if now is None:
        return rows
    chance = random.Random(0)
    best, best_rows, best_move = now, rows, 0
    undoing: dict[_Change, int] = {}  # until which move each change is not to be made
    move = 0
    while tries > 0 and best.score > bound + EPSILON:
        move += 1
        choice, tried = _choose(network, rows, now, cap, chance, undoing)
        tries -= 1 + tried
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
    forbidden: dict[_Change, int],
) -> tuple[tuple[_Change, Times] | None, int]:
    """The first of the promising changes that makes the step no longer, else the least bad; how many were timed."""
    tail = tails(network, rows, now.order)
    held: dict[int, list[float]] = {}  # of each rank, before each of its passes
    promising: list[tuple[float, float, _Change]] = []
    for block in critical_blocks(network, rows, now, tail, chance):
        rank = block.rank
        if rank not in held:
            held[rank] = [0.0, *accumulate(network.change[number] for number in rows[rank])]
        for change in _changes(network, rows, block):
            if change not in forbidden and _fits(network, change, held[rank][change.at], cap[rank]):
                promising.append((_estimate(network, rows[rank], now.end, tail, change), chance.random(), change))
    choice, tried = None, 0
    for _, _, change in sorted(promising)[:TIMED]:
        found = times(network, change.applied(rows))
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


def _fits(network: Network, change: _Change, held: float, cap: float) -> bool:
    """Whether passes in their new order keep to the memory; what is held behind them stays the same."""
    for number in change.passes:
        held += network.change[number]
        if held > cap + EPSILON:
            return False
    return True


def _estimate(network: Network, row: list[int], end: list[float], tail: list[float], change: _Change) -> float:
    """The longest path through the passes that move, if nothing else moved."""
    seconds, sender, receiver, delay = network.seconds, network.sender, network.receiver, network.delay
    _, at, passes = change
    time = end[row[at - 1]] if at else 0.0
    starts = []
    for number in passes:
        source = sender[number]
        if source >= 0:
            time = max(time, end[source] + delay[number])
        starts.append(time)
        time += seconds[number]
    behind = at + len(passes)
    way = tail[row[behind]] if behind < len(row) else network.lead[change.rank]
    longest = 0.0
    for number, start in zip(reversed(passes), reversed(starts), strict=True):
        other = receiver[number]
        if other >= 0:
            way = max(way, tail[other] + delay[other])
        way += seconds[number]
        longest = max(longest, start + way)
    return longest

"""The split when a rank carries several parts: even rank sums first, then even parts.

A local search starts at the best split of the parts by themselves. Then all splits that are no worse are
listed part by part. Where no step of that lists more than STATES of them, the answer is exact: for up to 18
layers always, for about 30 layers in 8 parts, for 100 in 4. Otherwise it is the local optimum: no better
split is one or two small changes away.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partition.split_line import ROUNDING, split_line

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

STATES = 1 << 16
"""The exact search gives up above this many beginnings of a split."""

MOVES = 2048
"""A turn of the local search looks at about this many pairs of moves."""

TURNS = 1000
"""The local search ends after this many turns. It needs far fewer: but for rounding, every one gains something."""


class Load(NamedTuple):
    """What is to be split, and over whom."""

    sums: Ints
    """Prefix sums of the weights."""
    carriers: Ints
    """The rank of every part, 0..ranks - 1."""
    caps: Ints | None = None
    """The earliest start of every part for each end, by its own memory cap."""
    memory: Floats | None = None
    """Prefix sums of the layers' memory in every part, in shares of what its rank has."""
    speeds: Floats | None = None
    """How fast each rank is, 1 for the fastest: its load is what it carries over its speed."""

    @property
    def pace(self) -> Floats:
        """(ranks,): the speeds, 1 where all are alike."""
        return np.ones(self.ranks) if self.speeds is None else self.speeds

    @property
    def ranks(self) -> int:
        return int(self.carriers.max()) + 1

    @property
    def membership(self) -> Ints:
        """(parts, ranks): 1 where the rank carries the part."""
        found: Ints = (self.carriers[:, None] == np.arange(self.ranks)).astype(np.int64)
        return found

    @property
    def last_part(self) -> Ints:
        """(ranks,): the last part of each rank, -1 for a rank without any."""
        found = np.full(self.ranks, -1)
        np.maximum.at(found, self.carriers, np.arange(len(self.carriers)))
        return found


class Score(NamedTuple):
    """Smaller is better, the first field first; arrays with one entry per split."""

    excess: Floats
    """How far memory caps are exceeded."""
    bottleneck: Floats
    squares: Floats
    part_squares: Floats


def split_chunks(load: Load) -> tuple[int, ...] | None:
    """The cuts of the best split found, or None where none was found that fits the memory caps."""
    paces = None if load.speeds is None else load.speeds[load.carriers]
    start = split_line(load.sums, len(load.carriers), load.caps, paces)
    if start is None:
        return None
    found = settle(load, np.array(start))
    better = every_better(load, found)
    if better is not None:
        found = better
    return None if score(load, found[None]).excess[0] > 0 else tuple(found.tolist())


def score(load: Load, cuts: Ints) -> Score:
    """cuts: (splits, parts + 1)."""
    weights = np.diff(load.sums[cuts], axis=1)
    ranks = (weights @ load.membership) / load.pace
    excess = np.zeros(len(cuts))
    part = np.arange(len(load.carriers))
    if load.caps is not None:
        excess += np.maximum(load.caps[part, cuts[:, 1:]] - cuts[:, :-1], 0).sum(axis=1)
    if load.memory is not None:
        held = load.memory[part, cuts[:, 1:]] - load.memory[part, cuts[:, :-1]]
        excess += np.maximum(held @ load.membership - 1, 0).sum(axis=1)
    return Score(
        excess,
        ranks.max(axis=1),
        np.sum(ranks**2, axis=1),
        np.sum((weights / load.pace[load.carriers]) ** 2, axis=1),
    )


def best_of(load: Load, cuts: Ints) -> Ints:
    """The best of some splits, the first of equals."""
    left = np.arange(len(cuts))
    for field in score(load, cuts):
        left = left[field[left] <= field[left].min() * (1 + ROUNDING)]
    best: Ints = cuts[left[0]]
    return best


def settle(load: Load, cuts: Ints) -> Ints:
    """Local search: the best change of one cut, or of two by a layer or two, until none helps."""
    for _ in range(TURNS):
        best = best_of(load, np.concatenate((cuts[None], changes(load, cuts))))
        if (best == cuts).all():
            break
        cuts = best
    return cuts


def changes(load: Load, cuts: Ints) -> Ints:
    """The splits near ``cuts`` that leave no part empty."""
    parts = len(cuts) - 1
    inner = np.arange(1, parts)
    unit: Ints = np.eye(parts + 1, dtype=np.int64)
    far: Ints = np.array([step for size in (1, 2, 3, 4, 6, 8, 12, 16) for step in (-size, size)])
    shifts: list[Ints] = [far[:, None, None] * unit[inner]]
    near: Ints = np.array([(one, two) for one in (-1, 1, -2, 2) for two in (-1, 1, -2, 2)])
    pairs = 0
    for gap in range(1, parts - 1):
        left = inner[: parts - 1 - gap]
        shifts.append(near[:, 0, None, None] * unit[left] + near[:, 1, None, None] * unit[left + gap])
        pairs += len(near) * len(left)
        if pairs > MOVES:
            break
    moved: Ints = cuts + np.concatenate([shift.reshape(-1, parts + 1) for shift in shifts])
    kept: Ints = moved[(np.diff(moved, axis=1) > 0).all(axis=1)]
    return kept


def every_better(load: Load, known: Ints) -> Ints | None:
    """The best of all splits no worse than ``known``; None if there are too many beginnings to list."""
    goal = goal_of(load, known)
    ranks = load.ranks
    begun = Begun(np.zeros((1, 1), np.int64), np.zeros((1, ranks), np.int64), np.zeros((1, ranks)))
    for part in range(len(load.carriers)):
        low, high = ends(load, goal, begun, part)
        width = np.maximum(high - low + 1, 0)
        if width.sum() > STATES:
            return None
        begun = hopeful(load, goal, extended(load, begun, part, low, width), part)
    return best_of(load, begun.cuts) if len(begun.cuts) else None


class Goal(NamedTuple):
    """What a split has to reach."""

    ceilings: Ints
    """(ranks,): what each may carry at most, by the bottleneck with an allowance for rounding."""
    bottleneck: float
    squares: float
    """The sum of squares may not be more, unless the bottleneck is lower."""
    is_least: bool
    """Whether no split has a lower bottleneck."""


class Begun(NamedTuple):
    """Beginnings of splits, one a line, all of the same number of parts."""

    cuts: Ints
    loads: Ints
    """(beginnings, ranks)."""
    held: Floats
    """(beginnings, ranks), in shares of the rank's memory."""


def goal_of(load: Load, known: Ints) -> Goal:
    reached = score(load, known[None])
    total, pace = int(load.sums[-1]), load.pace
    if reached.excess[0] > 0:
        return Goal(np.full(load.ranks, total), total / pace.min(), np.inf, False)
    bottleneck = float(reached.bottleneck[0])
    share = -(-total // load.ranks) if load.speeds is None else total / pace.sum()
    squares = float(reached.squares[0]) * (1 + ROUNDING)
    ceilings = np.minimum(bottleneck * (1 + ROUNDING) * pace, total).astype(np.int64)
    return Goal(ceilings, bottleneck, squares, bottleneck <= max(share, float(np.diff(load.sums).max())))


def ends(load: Load, goal: Goal, begun: Begun, part: int) -> tuple[Ints, Ints]:
    """The first and the last cut at which the part may end, for each beginning.

    All ranks at their ceilings would carry some more than there is. What a rank leaves free after its last
    part is taken from that for good, so the last part of a rank has a least end, and few beginnings go on.
    """
    sums, rank = load.sums, load.carriers[part]
    last = len(load.carriers) - 1
    at = begun.cuts[:, -1]
    free = sums[at] + goal.ceilings[rank] - begun.loads[:, rank]
    high = np.minimum(np.searchsorted(sums, free, side="right") - 1, len(sums) - 1 - (last - part))
    if load.caps is not None:
        high = np.minimum(high, np.searchsorted(load.caps[part], at, side="right") - 1)
    if part == last:
        return np.full_like(at, len(sums) - 1), high
    if load.last_part[rank] > part:
        return at + 1, high
    finished = load.last_part < part
    unused = (goal.ceilings[finished] - begun.loads[:, finished]).sum(axis=1)
    spare = goal.ceilings.sum() - sums[-1] - unused
    return np.maximum(at + 1, np.searchsorted(sums, free - spare)), high


def extended(load: Load, begun: Begun, part: int, low: Ints, width: Ints) -> Begun:
    """Every beginning with each of ``width`` ends of the part, from ``low`` on."""
    origin = np.repeat(np.arange(len(width)), width)
    end = np.arange(len(origin)) + np.repeat(low - (np.cumsum(width) - width), width)
    begin, rank = begun.cuts[origin, -1], load.carriers[part]
    loads, held = begun.loads[origin], begun.held[origin]
    loads[:, rank] += load.sums[end] - load.sums[begin]
    if load.memory is not None:
        held[:, rank] += load.memory[part, end] - load.memory[part, begin]
    return Begun(np.column_stack((begun.cuts[origin], end)), loads, held)


def hopeful(load: Load, goal: Goal, begun: Begun, part: int) -> Begun:
    """The beginnings that memory allows and whose squares may still be few enough.

    What the unfinished ranks will carry together is known; in shares by the square of their speed, equal ones
    where these are equal, it would have the least squares.
    """
    finished, pace = load.last_part <= part, load.pace
    done = begun.loads[:, finished]
    rest = (load.sums[-1] - done.sum(axis=1)).astype(np.float64)
    shares = float(np.sum(pace[~finished] ** 2)) or 1.0
    squares = np.sum((done / pace[finished]) ** 2, axis=1) + rest**2 / shares
    no_gain = goal.is_least | ((begun.loads / pace).max(axis=1) >= goal.bottleneck)
    kept = (begun.held <= 1).all(axis=1) & (~no_gain | (squares <= goal.squares))
    return Begun(*(field[kept] for field in begun))

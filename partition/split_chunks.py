"""The split when a rank carries several parts: the rank sums first, their evenness, then the evenness of the parts.

A local search starts at the best split of the parts by themselves. Then all splits that could be better are listed,
part by part; while no step of that holds more than STATES of them, which covers 12 layers in any shape, 30 in 8 parts and 100 in
4, the answer is exact. Otherwise it is the local optimum: no layer or two can move from part to part and make it better.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partition.split_line import split_line

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

STATES = 1 << 16
"""The exact search gives up above this many beginnings of a split."""

MOVES = 2048
"""A turn of the local search looks at about this many pairs of moves."""


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

    @property
    def ranks(self) -> int:
        return int(self.carriers.max()) + 1

    @property
    def membership(self) -> Ints:
        """(parts, ranks): 1 where the rank carries the part."""
        return (self.carriers[:, None] == np.arange(self.ranks)).astype(np.int64)


class Score(NamedTuple):
    """Smaller is better, the first field first; arrays with one entry per split."""

    excess: Floats
    """How far memory caps are exceeded."""
    bottleneck: Ints
    squares: Floats
    part_squares: Floats


def split_chunks(load: Load) -> tuple[int, ...] | None:
    """The cuts of the best split found, or None where none was found that fits the memory caps."""
    start = split_line(load.sums, len(load.carriers), load.caps)
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
    ranks = weights @ load.membership
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
        np.sum(ranks.astype(np.float64) ** 2, axis=1),
        np.sum(weights.astype(np.float64) ** 2, axis=1),
    )


def best_of(load: Load, cuts: Ints) -> Ints:
    """The best of some splits, the first of equals."""
    return cuts[np.lexsort(score(load, cuts)[::-1])[0]]


def settle(load: Load, cuts: Ints) -> Ints:
    """Local search: the best change of one cut, or of two by a layer or two, until none helps."""
    while True:
        best = best_of(load, np.concatenate((cuts[None], changes(load, cuts))))
        if (best == cuts).all():
            return cuts
        cuts = best


def changes(load: Load, cuts: Ints) -> Ints:
    """The splits near `cuts` that leave no part empty."""
    parts = len(cuts) - 1
    inner, unit = np.arange(1, parts), np.eye(parts + 1, dtype=np.int64)
    far = np.array([step for size in (1, 2, 3, 4, 6, 8, 12, 16) for step in (-size, size)])
    shifts = [(far[:, None, None] * unit[inner]).reshape(-1, parts + 1)]
    near = np.array([(one, two) for one in (-1, 1, -2, 2) for two in (-1, 1, -2, 2)])
    pairs = 0
    for gap in range(1, parts - 1):
        left = inner[: parts - 1 - gap]
        both = near[:, 0, None, None] * unit[left] + near[:, 1, None, None] * unit[left + gap]
        shifts.append(both.reshape(-1, parts + 1))
        pairs += len(shifts[-1])
        if pairs > MOVES:
            break
    moved = cuts + np.concatenate(shifts)
    return moved[(np.diff(moved, axis=1) > 0).all(axis=1)]


def every_better(load: Load, known: Ints) -> Ints | None:
    """The best split of all that are no worse than `known`, found part by part; None if there are too many beginnings.

    With T the bottleneck of `known`, ranks * T - total is all the room that full ranks may leave unused: what a rank leaves
    after its last part is known then, and most beginnings end there.
    """
    goal = score(load, known[None])
    ceiling = int(goal.bottleneck[0]) if goal.excess[0] == 0 else int(load.sums[-1])
    squares = float(goal.squares[0]) if goal.excess[0] == 0 else np.inf
    sums, parts, ranks = load.sums, len(load.carriers), load.ranks
    layers, total = len(sums) - 1, int(sums[-1])
    least = max(-(-total // ranks), int(np.diff(sums).max()))
    cuts, loads, held = np.zeros((1, 1), np.int64), np.zeros((1, ranks), np.int64), np.zeros((1, ranks))
    for part in range(parts):
        rank, rest = load.carriers[part], parts - 1 - part
        full = ~np.isin(np.arange(ranks), load.carriers[part:])
        room = ranks * ceiling - total - (ceiling - loads[:, full]).sum(axis=1)
        at = cuts[:, -1]
        free = sums[at] + ceiling - loads[:, rank]
        low = at + 1
        if rank not in load.carriers[part + 1 :]:
            low = np.maximum(low, np.searchsorted(sums, free - room))
        high = np.minimum(np.searchsorted(sums, free, side="right") - 1, layers - rest)
        if load.caps is not None:
            high = np.minimum(high, np.searchsorted(load.caps[part], at, side="right") - 1)
        if rest == 0:
            low = np.maximum(low, layers)
        width = np.maximum(high - low + 1, 0)
        if width.sum() > STATES:
            return None
        state = np.repeat(np.arange(len(at)), width)
        end = np.arange(len(state)) - np.repeat(np.cumsum(width) - width - low, width)
        cuts, loads, held = np.column_stack((cuts[state], end)), loads[state], held[state]
        loads[:, rank] += sums[end] - sums[cuts[:, -2]]
        if load.memory is not None:
            held[:, rank] += load.memory[part, end] - load.memory[part, cuts[:, -2]]
        full[rank] |= rank not in load.carriers[part + 1 :]
        done = loads[:, full].astype(np.float64)
        least_squares = np.sum(done**2, axis=1) + (total - done.sum(axis=1)) ** 2 / max(ranks - full.sum(), 1)
        tight = (loads.max(axis=1) == ceiling) | (least == ceiling)
        kept = (held <= 1).all(axis=1) & ~(tight & (least_squares > squares * (1 + 1e-12)))
        cuts, loads, held = cuts[kept], loads[kept], held[kept]
    return best_of(load, cuts) if len(cuts) else None

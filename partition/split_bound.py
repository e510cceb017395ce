"""How far from a good split the cuts of the best one can lie: what keeps the exact search narrow.

Let a *heavy* layer outweigh the share that is left for the parts without one. No split has a sum of squares
below that of the heavy layers alone plus share**2 for each other part. A good split is some excess above this
bound, and a cut that alone costs more than the excess is not in the best split.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

SAFETY = 1e-12
"""Widens the excess and the reach by this share of the whole, far more than rounding can take from them."""

TURNS = 64
"""How often the cuts of a good split are moved to the middle of their neighbours."""


class Heavy(NamedTuple):
    """The layers above the share, and the share."""

    layers: NDArray[np.bool_]
    """One per layer: is it heavy?"""
    share: float
    """What each part without a heavy layer carries when all others are equal."""
    margin: float
    """How far every heavy layer is above the share at least."""


def heavy_layers(sums: Ints, parts: int) -> Heavy:
    weights = np.diff(sums).astype(np.float64)
    largest = np.sort(weights)[::-1][:parts]
    left = sums[-1] - (np.cumsum(largest) - largest)
    shares = left / (parts - np.arange(len(largest)))
    share = float(shares[np.argmax(largest <= shares)])
    heavy = weights > share
    margin = float(weights[heavy].min() - share) if heavy.any() else float(sums[-1]) + 1.0
    return Heavy(heavy, share, margin)


def reach_of_best(sums: Ints, cuts: Ints) -> tuple[Ints, Ints]:
    """The first and last position of each cut 0..parts in any split no less even than ``cuts``.

    A cut behind c heavy layers and light weight y, of which m = s - c parts before it hold no heavy layer,
    stands d = y - share * m beside the even place. For every rate up to the lightest heavy layer, the squares
    before it are at least those of its heavy layers + 2 * rate * y - rate**2 * m (also with m < 0, when heavy
    layers must share a part, since merging two adds twice their product). The best rate gives d**2 / m over
    the bound while d <= margin * m, and margin * (2 * d - margin * m) beyond it; behind the cut the same
    holds of -d. What exceeds the excess is out.
    """
    parts = len(cuts) - 1
    heavy, share, margin = heavy_layers(sums, parts)
    weights = np.diff(sums)
    count = np.concatenate(([0], np.cumsum(heavy)))
    light = np.concatenate(([0], np.cumsum(np.where(heavy, 0, weights)))).astype(np.float64)
    heavies, shares = int(count[-1]), parts - int(count[-1])
    squares = float(np.sum(np.diff(sums[cuts]).astype(np.float64) ** 2))
    bound = float(np.sum(weights[heavy].astype(np.float64) ** 2)) + light[-1] ** 2 / shares
    excess = max(squares - bound, 0.0) + SAFETY * squares

    before = np.arange(-heavies, parts + 1, dtype=np.float64)
    behind = shares - before
    above = np.minimum(widest(before, excess, margin), np.sqrt(excess * np.maximum(behind, 0)))
    below = np.minimum(widest(behind, excess, margin), np.sqrt(excess * np.maximum(before, 0)))
    even, safety = share * before, SAFETY * light[-1]
    highest = np.maximum.accumulate(even + above + safety)
    lowest = np.minimum.accumulate((even - below - safety)[::-1])[::-1]
    fewest = count + np.searchsorted(highest, light) - heavies
    most = count + np.searchsorted(lowest, light, side="right") - 1 - heavies
    cut = np.arange(parts + 1)
    return np.searchsorted(most, cut), np.searchsorted(fewest, cut, side="right") - 1


def widest(parts: Floats, excess: float, margin: float) -> Floats:
    """The largest d that costs no more than ``excess`` on a side with too much weight for its light parts."""
    steep = (excess + margin**2 * parts) / (2 * margin)
    return np.where(excess <= margin**2 * parts, np.sqrt(excess * np.maximum(parts, 0)), steep)


def good_split(sums: Ints, starts: Ints, first: Ints, last: Ints) -> Ints | None:
    """A split near the best: each part as near as it gets to its share of what is left, then evened out.

    None where memory caps lead this way into a dead end.
    """
    parts = len(starts)
    heavy, share, _ = heavy_layers(sums, parts)
    count = np.concatenate(([0], np.cumsum(heavy)))
    light = np.concatenate(([0], np.cumsum(np.where(heavy, 0, np.diff(sums)))))
    cuts = np.zeros(parts + 1, np.int64)
    for part in range(parts):
        cut = cuts[part]
        shares = parts - part - int(count[-1] - count[cut])
        goal = sums[cut] + ((light[-1] - light[cut]) / shares if shares > 0 else share)
        low = max(first[part + 1], cut + 1)
        high = min(last[part + 1], int(np.searchsorted(starts[part], cut, side="right")) - 1)
        if low > high:
            return None
        cuts[part + 1] = min(max(int(nearest(sums, goal)), low), high)
    return evened(sums, starts, cuts)


def evened(sums: Ints, starts: Ints, cuts: Ints) -> Ints:
    """Odd and even cuts move in turn to the middle of their neighbours, until none of them moves."""
    still = 0
    for turn in range(TURNS):
        cut = np.arange(1 + turn % 2, len(cuts) - 1, 2)
        here, left, right = cuts[cut], cuts[cut - 1], cuts[cut + 1]
        middle = (sums[left] + sums[right]) / 2
        there = np.clip(nearest(sums, middle), left + 1, right - 1)
        better = np.abs(sums[there] - middle) < np.abs(sums[here] - middle)
        better &= (starts[cut - 1, there] <= left) & (starts[cut, right] <= there)
        cuts[cut] = np.where(better, there, here)
        still = 0 if better.any() else still + 1
        if still == 2:
            break
    return cuts


def nearest(sums: Ints, goal: Floats) -> Ints:
    """The cut whose prefix sum is nearest to the goal, the earlier one of two."""
    after = np.minimum(np.searchsorted(sums, goal), len(sums) - 1)
    before = np.maximum(after - 1, 0)
    return np.where(goal - sums[before] <= sums[after] - goal, before, after)

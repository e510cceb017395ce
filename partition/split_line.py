"""The exact split when every part has a rank of its own: the least bottleneck, then the least sum of squares.

Weights come as prefix sums of integers, so that equal sums compare equal. A *cut* is a position 0..n between
layers; cut s ends part s - 1. ``starts[s][x]`` is the earliest cut at which part s may begin if it ends at x;
it never falls as x grows, and all limits (bottleneck and memory) are in it. Where ranks differ in speed, ``speeds``
has one number a part, 1 for the fastest, and what a part weighs is its sum over its speed.
"""

import math
from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

from partition.split_bound import good_split, reach_of_best

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

ROUNDING = 1e-12
"""Bottlenecks that differ by this share are equal: 0.1 + 0.2 is no more than 0.3."""

DENSE = 1 << 14
"""Up to this many (previous cut, cut) pairs, a step of the search is one matrix."""

WIDE = 40
"""With more positions a cut than this, bounds from a good split pay for themselves."""


def split_line(
    sums: Ints, parts: int, caps: Ints | None = None, speeds: Floats | None = None
) -> tuple[int, ...] | None:
    """The cuts of the best split into ``parts`` non-empty parts, or None where the memory caps leave none.

    sums: prefix sums of the weights, sums[0] == 0, len(sums) > parts. caps: starts (parts, n + 1) that memory
    allows.
    """
    alike = caps is None and speeds is None
    bound = least_bottleneck(sums, parts) if alike else least_capped(sums, parts, caps, speeds)
    if bound is None:
        return None
    starts = within(sums, bound + int(bound * ROUNDING), parts, caps, speeds)
    first, last = hull(starts)
    bounded = speeds is None and np.mean(last - first) > WIDE  # what is known of good splits is of equal ranks
    known = good_split(sums, starts, first, last) if bounded else None
    if known is not None:
        nearest, furthest = reach_of_best(sums, known)
        first, last = np.maximum(first, nearest), np.minimum(last, furthest)
    return most_even(sums, starts, first, last, speeds)


def least_bottleneck(sums: Ints, parts: int) -> int:
    """The smallest T such that ``parts`` consecutive parts of at most T each cover all layers.

    The answer is the sum of an interval. A probe that succeeds lowers the upper end to the largest part it
    made, one that fails raises the lower end to the smallest sum that would have let a part take one layer
    more (Nicol, J. Parallel Distrib. Comput. 23, 1994). No weight is negative, so a cover by fewer parts can
    be cut further: no part stays empty.
    """
    ends: list[int] = sums.tolist()
    layers, total = len(ends) - 1, ends[-1]
    heaviest = int(np.diff(sums).max())
    low, high = max(heaviest, -(-total // parts)), heaviest + total // parts
    while low < high:
        bound = (low + high) // 2
        reached = largest = cut = 0
        enough = high
        for _ in range(parts):
            cut = bisect_right(ends, reached + bound, cut) - 1
            largest = max(largest, ends[cut] - reached)
            if cut == layers:
                break
            enough = min(enough, ends[cut + 1] - reached)
            reached = ends[cut]
        if cut == layers:
            high = largest
        else:
            low = enough
    return high


def least_capped(sums: Ints, parts: int, caps: Ints | None, speeds: Floats | None = None) -> int | None:
    """The smallest bottleneck under memory caps, by bisection; None where even the largest does not help."""
    low, high = int(max(np.diff(sums).max(), -(-sums[-1] // parts))), int(sums[-1])
    if speeds is not None:
        high = math.ceil(high / speeds.min())
    if not reachable(within(sums, high, parts, caps, speeds)):
        return None
    while low < high:
        bound = (low + high) // 2
        if reachable(within(sums, bound, parts, caps, speeds)):
            high = bound
        else:
            low = bound + 1
    return high


def within(sums: Ints, bound: int, parts: int, caps: Ints | None, speeds: Floats | None = None) -> Ints:
    """The starts that a bottleneck of at most ``bound``, and the memory caps, allow."""
    if speeds is None:
        starts = np.broadcast_to(np.searchsorted(sums, sums - bound), (parts, len(sums)))
    else:
        most = np.floor(np.minimum(bound * speeds, float(sums[-1]))).astype(np.int64)
        unlike, which = np.unique(most, return_inverse=True)
        starts = np.stack([np.searchsorted(sums, sums - one) for one in unlike])[which]
    return starts if caps is None else np.maximum(starts, caps)


def hull(starts: Ints) -> tuple[Ints, Ints]:
    """The first and last position of each cut 0..parts, by filling parts from the right and the left."""
    parts, layers = len(starts), starts.shape[1] - 1
    first, last = np.zeros(parts + 1, np.int64), np.zeros(parts + 1, np.int64)
    first[parts] = layers
    for part in range(parts):
        furthest = int(np.searchsorted(starts[part], last[part], side="right")) - 1
        last[part + 1] = min(furthest, layers - (parts - 1 - part))
    for part in range(parts - 1, 0, -1):
        first[part] = max(starts[part][first[part + 1]], part)
    return first, last


def reachable(starts: Ints) -> bool:
    """Whether non-empty parts within ``starts`` cover all layers."""
    first, last = hull(starts)
    at = np.zeros(1, np.int64)
    for part in range(len(starts)):
        to = np.arange(first[part + 1], last[part + 1] + 1)
        at = to[np.searchsorted(at, starts[part][to]) < np.searchsorted(at, to)]
    return len(at) > 0


def most_even(sums: Ints, starts: Ints, first: Ints, last: Ints, speeds: Floats | None = None) -> tuple[int, ...]:
    """The split with the least sum of squares whose cut s lies in first[s]..last[s], part by part."""
    parts, layers = len(starts), len(sums) - 1
    weight = sums.astype(np.float64)
    at, cost = np.zeros(1, np.int64), np.zeros(1)
    trail: list[tuple[Ints, Ints]] = []
    for part in range(parts):
        to = np.arange(first[part + 1], last[part + 1] + 1)
        low, high = np.searchsorted(at, starts[part][to]), np.searchsorted(at, to) - 1
        kept = low <= high
        to, low, high = to[kept], low[kept], high[kept]
        pace = 1.0 if speeds is None else speeds[part]
        best, cost = cheapest(cost, weight[at] / pace, weight[to] / pace, low, high)
        trail.append((at, best))
        at = to
    cuts, index = [layers], 0
    for at, best in reversed(trail):
        index = best[index]
        cuts.append(int(at[index]))
    return tuple(reversed(cuts))


def cheapest(cost: Floats, before: Floats, after: Floats, low: Ints, high: Ints) -> tuple[Ints, Floats]:
    """The least cost[j] + (after[i] - before[j])**2 over j in low[i]..high[i], and its first j, for each i.

    The square of an interval's sum satisfies the quadrangle inequality, also with intervals forbidden for
    being too long, so the best j never falls as i grows: between two solved i only the j between their
    answers are looked at.
    """
    rows, columns = len(after), len(before)
    if rows * columns <= DENSE:
        grid = cost + (after[:, None] - before) ** 2
        column = np.arange(columns)
        grid[(column < low[:, None]) | (column > high[:, None])] = np.inf
        best = grid.argmin(axis=1)
        return best, grid[np.arange(rows), best]
    best, least = np.empty(rows, np.int64), np.empty(rows)
    best[:1], least[:1] = scan(cost, before, after[:1], low[:1], high[:1])
    stride = 1 << (rows - 1).bit_length()
    while stride > 1:
        half = stride // 2
        row = np.arange(half, rows, stride)
        above = row[row + half < rows]
        start, stop = np.maximum(low[row], best[row - half]), high[row]
        stop[: len(above)] = np.minimum(high[above], best[above + half])
        best[row], least[row] = scan(cost, before, after[row], start, stop)
        stride = half
    return best, least


def scan(cost: Floats, before: Floats, after: Floats, start: Ints, stop: Ints) -> tuple[Ints, Floats]:
    """The same by looking at every j in start[i]..stop[i]."""
    width = stop - start + 1
    begin = np.cumsum(width) - width
    row = np.repeat(np.arange(len(width)), width)
    column = np.arange(len(row)) - (begin - start)[row]
    value = cost[column] + (after[row] - before[column]) ** 2
    near = np.flatnonzero(value == np.minimum.reduceat(value, begin)[row])
    found = near[np.searchsorted(row[near], np.arange(len(width)))]
    return column[found], value[found]

"""Choosing among nearly equal cuts by what the simulator says of the whole step.

The bottleneck decides the steady state of a pipeline, and that is what ``split`` knows. How long it takes to
fill and to drain, and what two chunks of one rank do to each other, depends on the schedule: with several
stages a rank, cuts with equal rank sums differ by up to a tenth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations, pairwise

from partition.costs import Profile
from partition.partition import Partition
from partition.predict import predict_timeline
from schedules import Schedule

Cuts = tuple[int, ...]

ACTIONS = 100_000
"""Simulate about this many actions in all, a fraction of a second."""

TRIALS = 250
"""And no more than this many partitions."""

GAIN = 1e-9
"""A step that is shorter by less than this share is not shorter."""


def quickest(
    profile: Profile, schedule: Schedule, starts: Sequence[Cuts], fit: Callable[[Cuts], bool] | None = None
) -> Cuts:
    """The cuts with the shortest simulated step: of all there are if these are few, else of those near ``starts``.

    Near are those that moves of one layer lead to, each making the step shorter. The first of ``starts`` is kept
    where nothing is quicker. ``fit`` says whether other cuts keep within memory. Deterministic: the work is limited
    by number, not by time; for very large schedules only the starts are compared.
    """
    layers, parts = starts[0][-1], len(starts[0]) - 1
    trials = max(len(starts), min(TRIALS, ACTIONS // max(len(schedule.actions), 1)))
    known: dict[Cuts, float] = {}

    def seconds(cuts: Cuts) -> float:
        if cuts not in known:
            known[cuts] = predict_timeline(profile, Partition(cuts), schedule).step_time
        return known[cuts]

    def quicker(candidates: Iterable[Cuts]) -> Iterator[Cuts]:
        for cuts in candidates:
            if len(known) >= trials:
                return
            if (fit is None or fit(cuts)) and seconds(cuts) < seconds(best) * (1 - GAIN):
                yield cuts

    best = min(starts, key=seconds)
    if math.comb(layers - 1, parts - 1) <= trials:
        every = ((0, *inner, layers) for inner in combinations(range(1, layers), parts - 1))
        return min((best, *quicker(every)), key=seconds)
    while (nearer := next(quicker(neighbours(best)), None)) is not None:
        best = nearer
    return best


def neighbours(cuts: Cuts) -> Iterator[Cuts]:
    """The cuts with one of them moved by a layer, or both ends of a part, and no part emptied."""
    inner = range(1, len(cuts) - 1)
    for moved in [*((cut, cut) for cut in inner), *((cut, cut + 1) for cut in inner[:-1])]:
        for shift in (-1, 1):
            near = tuple(at + shift * (moved[0] <= index <= moved[1]) for index, at in enumerate(cuts))
            if all(begin < end for begin, end in pairwise(near)):
                yield near

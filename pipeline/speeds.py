"""How fast each rank is, from the times that the same layers took on all of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

__all__ = ["rank_speeds", "slowest_copies"]

_NOISE = 1.05
"""Ranks whose times differ from the typical ones by less than this factor are equally fast."""


def rank_speeds(seconds: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """The speed of each rank; ``seconds``: (ranks, layers), what the same layers took on each.

    A layer's typical time is its median over ranks.  A rank has the speed 1 unless it is beyond the noise in layers
    that make up three quarters of the time; then it has the one by which half of the time is in layers that it does no
    faster.  So a disturbance during a few layers changes nothing.
    """
    typical = [statistics.median(layer) for layer in zip(*seconds, strict=True)]
    found = []
    for own in seconds:
        ratios = sorted((time / usual, usual) for time, usual in zip(own, typical, strict=True) if usual > 0)
        low, middle, high = (_quantile(ratios, share) for share in (0.25, 0.5, 0.75))
        found.append(1 / middle if low > _NOISE or high < 1 / _NOISE else 1.0)
    return tuple(found)


def slowest_copies(speeds: Sequence[float], columns: Sequence[Sequence[int]]) -> tuple[float, ...]:
    """The speed of each rank of a pipeline, from those of all ranks: that of its slowest data-parallel copy, which the
    others wait for; ``columns`` are the ranks at each place.  Empty where all are equally fast."""
    found = tuple(min(speeds[rank] for rank in column) for column in columns)
    return found if set(found) != {1.0} else ()


def _quantile(ratios: Sequence[tuple[float, float]], share: float) -> float:
    """The smallest ratio up to which this share of the weight is; ``ratios``: rising, each with its weight."""
    left = share * sum(weight for _, weight in ratios)
    for ratio, weight in ratios:
        left -= weight
        if left <= 0:
            return ratio
    return ratios[-1][0] if ratios else 1.0

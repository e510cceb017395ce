"""What layers cost and how fast ranks are now, from the times that layers took where they ran."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from partition.costs import LayerCost, Profile

__all__ = ["NOISE", "Seconds", "believed", "first_belief"]

NOISE = 1.05
"""Times that differ by less than this factor are the same."""


class Seconds(NamedTuple):
    """What a layer took for one micro-batch: its forward, what its backward computed at once, and its W if apart."""

    forward: float
    backward: float
    weights: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.weights


Seen = Sequence[Mapping[int, Seconds]]
"""One mapping a rank of the pipeline: what each layer that it holds took."""


def first_belief(layers: Sequence[LayerCost], seen: Seen) -> Profile:
    """A profile made of what was seen alone, where nothing was measured before: all ranks count as equally fast."""
    return _rescaled(Profile(layers=tuple(layers)), seen, [1.0] * len(seen))


def believed(profile: Profile, seen: Seen, moved: Iterable[tuple[int, int, int]] = ()) -> Profile:
    """The profile that explains what was seen, with speeds of ranks, beginning with what was believed before.

    Where all layers of a rank have become slower by one factor, the rank has; what has become slower on all ranks alike
    are the layers; and else each layer has its own time.  ``moved`` are layers that have changed ranks since, as
    ``(layer, from, to)``: if they take on their new rank what they would not if their old one were as fast as was
    believed, it was not the rank that had changed, but its layers.

    Medians weighted by time decide, so that a few odd layers change nothing.
    """
    speeds = list(profile.speeds_for(len(seen)) or (1.0,) * len(seen))
    costs = [layer.seconds for layer in profile.layers]
    for left, misjudged in _misjudged(costs, speeds, seen, list(moved)).items():
        speeds[left] *= misjudged
        for layer in {*seen[left], *(number for number, source, _ in moved if source == left)}:
            costs[layer] *= misjudged
    factors = _common_factors(costs, speeds, seen)
    known = [factor for factor in factors if factor is not None]
    everywhere = statistics.median_low(known) if known else 1.0
    for rank, factor in enumerate(factors):
        if factor is not None and not _alike(factor, everywhere):
            speeds[rank] /= factor / everywhere
    usual = statistics.median_high(speeds)
    return _rescaled(profile, seen, [speed / usual for speed in speeds])


def _misjudged(
    costs: Sequence[float], speeds: Sequence[float], seen: Seen, moved: Sequence[tuple[int, int, int]]
) -> dict[int, float]:
    """By what factor layers that have left a rank are slower than was believed of them, beyond what holds for the rank
    that they have come to; for ranks where that shows."""
    newcomers = {(number, target) for number, _, target in moved}
    found: dict[int, list[tuple[float, float]]] = {}
    for number, source, target in moved:
        took = seen[target].get(number)
        if took is None or costs[number] <= 0:
            continue
        residents = {n: t for n, t in seen[target].items() if (n, target) not in newcomers}
        usual = _common_factors(costs, [speeds[target]], [residents])[0] or 1.0
        found.setdefault(source, []).append((took.total * speeds[target] / costs[number] / usual, costs[number]))
    factors = {source: _median(pairs) for source, pairs in found.items()}
    return {source: factor for source, factor in factors.items() if not _alike(factor, 1.0)}


def _common_factors(costs: Sequence[float], speeds: Sequence[float], seen: Seen) -> list[float | None]:
    """How much longer than believed the layers of each rank took, if three quarters of the time say about the same.

    About: what scatters by a quarter of that by which ranks differ, on a logarithmic scale, does not hide it.
    """
    quartiles = [_quartiles(costs, speed, own) for speed, own in zip(speeds, seen, strict=True)]
    middles = [found[1] for found in quartiles if found]
    scatter = max(NOISE, (max(middles) / min(middles)) ** 0.25) if middles else NOISE

    def agree(low: float, middle: float, high: float) -> bool:
        return _alike(low, middle, scatter) and _alike(middle, high, scatter)

    return [found[1] if found and agree(*found) else None for found in quartiles]


def _quartiles(costs: Sequence[float], speed: float, own: Mapping[int, Seconds]) -> tuple[float, float, float] | None:
    """Of how much longer than believed the layers of a rank took, weighted by time."""
    timed = [(costs[n], took.total) for n, took in own.items() if costs[n] > 0 and took.total > 0]
    ratios = sorted((took * speed / cost, cost) for cost, took in timed)
    if not ratios:
        return None
    return _quantile(ratios, 0.25), _quantile(ratios, 0.5), _quantile(ratios, 0.75)


def _rescaled(profile: Profile, seen: Seen, speeds: Sequence[float]) -> Profile:
    """The layers at the times that they took, at speed 1; of those on several ranks the mean."""
    layers = list(profile.layers)
    for number, layer in enumerate(layers):
        took = [_at_speed_1(own[number], speed) for own, speed in zip(seen, speeds, strict=True) if number in own]
        if took:
            mean = Seconds(*(statistics.fmean(part) for part in zip(*took, strict=True)))
            layers[number] = _with_times(layer, mean)
    even = all(_alike(speed, 1.0) for speed in speeds)
    return profile.model_copy(update={"layers": tuple(layers), "speeds": () if even else tuple(speeds)})


def _at_speed_1(took: Seconds, speed: float) -> Seconds:
    return Seconds(*(part * speed for part in took))


def _with_times(layer: LayerCost, took: Seconds) -> LayerCost:
    """A backward that was not split is split as it was before, or in halves."""
    whole = layer.input_grad + layer.weight_grad
    apart = took.weights > 0
    share = layer.input_grad / whole if whole > 0 else 0.5
    input_grad = took.backward if apart else took.backward * share
    weight_grad = took.weights if apart else took.backward - input_grad
    return layer.model_copy(
        update={"forward": took.forward, "input_grad": input_grad, "weight_grad": max(weight_grad, 0.0)}
    )


def _alike(one: float, other: float, scatter: float = NOISE) -> bool:
    return abs(math.log(one / other)) <= math.log(scatter)


def _median(pairs: Sequence[tuple[float, float]]) -> float:
    return _quantile(sorted(pairs), 0.5)


def _quantile(ratios: Sequence[tuple[float, float]], share: float) -> float:
    """The smallest ratio up to which this share of the weight is; ``ratios``: rising, each with its weight."""
    left = share * sum(weight for _, weight in ratios)
    for ratio, weight in ratios:
        left -= weight
        if left <= 0:
            return ratio
    return ratios[-1][0]

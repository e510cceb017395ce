"""Micro-batches of other sizes: what layers would cost, and which size makes the shortest step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from partition.costs import LayerCost, Profile
from partition.errors import ProfileError

__all__ = ["SizeWatch", "Sized", "Verdict", "best", "costs_at", "numbers_of", "tried"]

_TIMES = ("forward", "input_grad", "weight_grad")
_BYTES = ("activation_bytes", "weight_grad_bytes", "output_bytes")


def numbers_of(rows: int) -> list[int]:
    """Into how many equal micro-batches so many rows can be cut: the divisors, ascending."""
    return [number for number in range(1, rows + 1) if rows % number == 0]


def costs_at(rows: int, known: Mapping[int, Profile]) -> Profile:
    """What layers cost for micro-batches of ``rows`` rows, by what they cost at other sizes.

    Each time, and each number of bytes that a micro-batch keeps, is taken for a + b·rows, none of the two below 0:
    through two known sizes, or nearest to more of them.  With one size, it is proportional.  Raises ``ProfileError``
    where no size is known.
    """
    if not known:
        raise ProfileError("no size of micro-batch has been measured")
    sizes, profiles = list(known), list(known.values())
    by_layer = zip(*(profile.layers for profile in profiles), strict=True)
    layers = [_layer_at(rows, sizes, costs) for costs in by_layer]
    hop = _line_at(rows, sizes, [profile.hop for profile in profiles])
    return profiles[-1].model_copy(update={"layers": tuple(layers), "hop": hop, "rows": rows})


def _layer_at(rows: int, sizes: Sequence[int], costs: Sequence[LayerCost]) -> LayerCost:
    times = {name: _line_at(rows, sizes, [getattr(cost, name) for cost in costs]) for name in _TIMES}
    kept = {name: round(_line_at(rows, sizes, [getattr(cost, name) for cost in costs])) for name in _BYTES}
    return costs[-1].model_copy(update={**times, **kept})


def _line_at(rows: int, sizes: Sequence[int], values: Sequence[float]) -> float:
    """The value at ``rows`` of the line a + b·rows that is nearest to the others, relative to each."""
    if len(sizes) == 1:
        return values[0] * rows / sizes[0]
    x, y = np.array(sizes, dtype=np.float64), np.array(values, dtype=np.float64)
    if not y.all():
        return float(y.mean())
    (a, b), *_ = np.linalg.lstsq(np.stack([1 / y, x / y], axis=1), np.ones(len(x)), rcond=None)
    if b < 0:
        return float(y.mean())
    if a < 0:
        return float(rows * (y / x).mean())
    return float(a + b * rows)


class Sized(NamedTuple):
    """Cut into ``number`` micro-batches, a step is predicted to take so many seconds; None where it cannot be."""

    number: int
    seconds: float | None


Predict = Callable[[int, Profile], float | None]
"""Seconds of a step of so many micro-batches at these costs, None where there is no such step, or no memory for it."""


def tried(rows: int, known: Mapping[int, Profile], predict: Predict) -> list[Sized]:
    """What is predicted for every number of micro-batches into which ``rows`` can be cut; for known sizes by what they
    took, and not by the line."""
    sizes = ((number, rows // number) for number in numbers_of(rows))
    return [Sized(number, predict(number, known.get(size) or costs_at(size, known))) for number, size in sizes]


def best(found: Sequence[Sized]) -> Sized | None:
    """The one with the shortest step, the fewest micro-batches among equals."""
    possible = [one for one in found if one.seconds is not None]
    return min(possible, key=lambda one: (one.seconds, one.number), default=None)


@dataclass(frozen=True, slots=True)
class Verdict:
    """``number`` micro-batches from now on, and why: to see what they cost, or since that makes the shortest step.

    ``stay``: it is the number that there is, and all that is known says so.
    """

    number: int
    why: Literal["stay", "look", "best"]
    now: float = 0.0
    then: float = 0.0


class SizeWatch:
    """Decides on the size of micro-batches while training runs, from what layers took at each size that was tried.

    A window of steps tells what layers take at one size.  Two sizes make a line for each layer, and so a prediction for
    all sizes.  Layers that take otherwise than they did at the same size, by more than ``noise``, have changed: what
    was known is forgotten, and the size next to the present one is looked at.
    """

    def __init__(self, rows: int, *, least_gain: float, noise: float = 1.15) -> None:
        self._rows = rows
        self._least_gain = least_gain
        self._noise = noise
        self.known: dict[int, Profile] = {}
        """By rows of a micro-batch, the oldest first."""
        self.settled = False
        """Whether the last verdict was to stay."""

    def decide(self, number: int, seen: Profile, predict: Predict) -> Verdict:
        """``seen`` is what layers took in the last window of steps, of ``number`` micro-batches each."""
        size = self._rows // number
        if size in self.known and not self._fits(seen, self.known[size]):
            self.known = {}
        self.known.pop(size, None)
        self.known[size] = seen
        verdict = self._verdict(number, predict)
        self.settled = verdict.why == "stay"
        return verdict

    def _verdict(self, number: int, predict: Predict) -> Verdict:
        if len(self.known) == 1:
            other = self._neighbour(number, predict)
            return Verdict(number, "stay") if other is None else Verdict(other, "look")
        found = tried(self._rows, self.known, predict)
        now, chosen = next(one for one in found if one.number == number), best(found)
        if chosen is None or chosen.seconds is None or now.seconds is None or chosen.number == number:
            return Verdict(number, "stay")
        if chosen.seconds > now.seconds * (1 - self._least_gain):
            return Verdict(number, "stay")
        return Verdict(chosen.number, "best", now.seconds, chosen.seconds)

    def _neighbour(self, number: int, predict: Predict) -> int | None:
        """A number near this one for which there is memory: fewer micro-batches before more."""
        numbers = numbers_of(self._rows)
        place = numbers.index(number)
        near = [*reversed(numbers[:place]), *numbers[place + 1 :]]
        near.sort(key=lambda other: abs(numbers.index(other) - place))
        allowed = (n for n in near if predict(n, costs_at(self._rows // n, self.known)) is not None)
        return next(allowed, None)

    def _fits(self, seen: Profile, expected: Profile) -> bool:
        took, should = (sum(layer.seconds for layer in one.layers) for one in (seen, expected))
        return should / self._noise <= took <= should * self._noise

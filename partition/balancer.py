"""When layers should change ranks while training runs: for a gain that all recent steps show and that pays the move."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from partition.costs import Profile
from partition.drift import NOISE, Seconds, believed
from partition.moves import Move, Moves
from partition.partition import Partition, ranges
from partition.predict import predict_timeline
from schedules import Schedule

_CHANGED = 1.25
"""Layers that differ by this factor from the others are told of."""

__all__ = ["Alarm", "Proposal", "Terms", "medians", "propose"]


@dataclass(frozen=True, slots=True)
class Terms:
    """What a move must come to: ``window`` steps show a gain of the share ``least_gain`` of a step, and over
    ``horizon`` steps it is more than the move takes."""

    window: int = 5
    least_gain: float = 0.05
    horizon: int = 200


class Alarm:
    """Tells from how busy ranks are, which every step tells anyway, when to look at single layers."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._busy: deque[Sequence[float]] = deque(maxlen=terms.window)
        self._settled: Sequence[float] | None = None

    def rings(self, busy: Sequence[float]) -> bool:
        """Whether ranks are unevenly busy, and otherwise than when that was last looked into; ``busy``: seconds, one a
        rank of the pipeline.  The same on every rank that is told the same."""
        self._busy.append(busy)
        if len(self._busy) < self._terms.window:
            return False
        usual = self._usual()
        if statistics.fmean(usual) >= max(usual) * (1 - self._terms.least_gain):
            return False
        if self._settled is None:
            return True
        ratios = sorted(now / then for now, then in zip(usual, self._settled, strict=True) if then > 0)
        return bool(ratios) and ratios[-1] / ratios[0] > NOISE

    def settle(self) -> None:
        """It has been looked into, and this is how it stays."""
        self._settled = self._usual()

    def reset(self) -> None:
        """The layers are elsewhere now."""
        self._busy.clear()
        self._settled = None

    def _usual(self) -> list[float]:
        return [statistics.median(rank) for rank in zip(*self._busy, strict=True)]


@dataclass(frozen=True, slots=True)
class Proposal:
    """Other cuts, what would change places, and seconds of a step with the cuts there are and with these.

    ``verdict``: they are to be taken, the next steps may show that they are, or all stays as it is.
    """

    profile: Profile
    """What layers and ranks are believed to cost now."""
    partition: Partition
    moves: Moves
    now: float
    then: float
    takes: float
    """Seconds of the move, as far as is known."""
    verdict: Literal["move", "wait", "stay"]
    reason: str

    @property
    def gain(self) -> float:
        """The share of a step that it saves."""
        return 1 - self.then / self.now if self.now > 0 else 0.0


Steps = Sequence[Sequence[Mapping[int, Seconds]]]
"""For each step one mapping a rank of the pipeline, of layers to what they took there."""


def propose(
    profile: Profile,
    schedule: Schedule,
    partition: Partition,
    steps: Steps,
    cut: Callable[[Profile], Partition],
    terms: Terms,
    *,
    move_seconds: Callable[[Moves], float],
    moved: Sequence[Move] = (),
) -> Proposal:
    """Where the layers should be, by what they took in the last steps.

    ``cut`` makes the best cuts for a profile, ``move_seconds`` says what a move takes, and ``moved`` are the moves that
    were made before these steps and after the ``profile`` was believed.

    A gain that only medians over the window show may be noise: each step but one must show half of it.
    """
    belief = believed(profile, medians(steps), moved)
    better = cut(belief)
    moves = Moves.between(partition, better, schedule)
    now, then = (predict_timeline(belief, cuts, schedule).step_time for cuts in (partition, better))
    found = Proposal(belief, better, moves, now, then, move_seconds(moves), "stay", "")
    if not moves.moves or found.gain < terms.least_gain:
        saved = f"other cuts would save {max(found.gain, 0):.1%} of a step, less than {terms.least_gain:.1%}"
        return replace(found, reason=saved)
    if (now - then) * terms.horizon < found.takes:
        reason = f"a move would take {found.takes:.3g} s, more than it would save in {terms.horizon} steps"
        return replace(found, reason=reason)
    agree = sum(_gain(believed(belief, step), schedule, partition, better) >= found.gain / 2 for step in steps)
    if agree < len(steps) - 1:
        return replace(found, verdict="wait", reason=f"only {agree} of the last {len(steps)} steps show it")
    return replace(found, verdict="move", reason=_what_is_seen(profile, belief))


def medians(steps: Steps) -> list[dict[int, Seconds]]:
    """The usual times over some steps, by rank and layer."""
    return [
        {n: Seconds(*map(statistics.median, zip(*(step[rank][n] for step in steps), strict=True))) for n in layers}
        for rank, layers in enumerate(steps[-1])
    ]


def _gain(profile: Profile, schedule: Schedule, now: Partition, then: Partition) -> float:
    before, after = (predict_timeline(profile, cuts, schedule).step_time for cuts in (now, then))
    return 1 - after / before


def _what_is_seen(before: Profile, after: Profile) -> str:
    """What is uneven, in words: ranks that are slow or fast, and layers that have changed."""
    words = [
        f"rank {rank} is {_times(1 / speed)} as the others"
        for rank, speed in enumerate(after.speeds)
        if not 1 / NOISE <= speed <= NOISE
    ]
    pairs = zip(before.layers, after.layers, strict=True)
    ratios = [new.seconds / old.seconds if old.seconds > 0 else 1.0 for old, new in pairs]
    usual = statistics.median_low(ratios)
    changed = [n for n, ratio in enumerate(ratios) if not 1 / _CHANGED <= ratio / usual <= _CHANGED]
    if changed:
        words.append(f"{'layers' if len(changed) > 1 else 'layer'} {ranges(changed)} changed what they take")
    return " and ".join(words) or "ranks are unevenly busy"


def _times(factor: float) -> str:
    return f"{factor:.2f} times as slow" if factor > 1 else f"{1 / factor:.2f} times as fast"

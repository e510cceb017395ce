"""When a checkpoint is due: after so many steps, so much time, or as often as pays for a stated rate of failures."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

__all__ = ["Due", "best_interval"]

_SECONDS = {"second": 1.0, "minute": 60.0, "hour": 3600.0}


def best_interval(stall: float, between_failures: float) -> float:
    """Seconds between checkpoints that lose the least time, where each holds up training for ``stall`` seconds and all
    work since the last is lost every ``between_failures`` seconds.

    First order: Young, "A first order approximation to the optimum checkpoint interval", CACM 1974.
    """
    return math.sqrt(2 * stall * between_failures)


class Due:
    """Asked on one rank before every step ends; ``every`` is the setting ``save_every``."""

    def __init__(self, every: str, failure_hours: float, clock: Callable[[], float] = time.monotonic) -> None:
        amount, _, unit = every.partition(" ")
        self._steps = int(amount) if unit.startswith("step") else 0
        self._interval = float(amount) * _SECONDS[unit.removesuffix("s")] if unit and not self._steps else math.inf
        self._auto = every == "auto"
        self._between_failures = failure_hours * 3600.0
        self._clock = clock
        self._last = clock()

    @property
    def interval(self) -> float:
        """Seconds between checkpoints, infinite where they go by steps or are never due."""
        return self._interval

    def after(self, steps: int, busy: bool = False) -> bool:
        """Whether a checkpoint is due after this many updates; ``auto`` writes the first at once, to measure it.

        One that goes by time waits for a step in which no other is being written, where ``busy`` is false.
        """
        if self._steps:
            return steps % self._steps == 0
        if busy:
            return False
        if self._auto and math.isinf(self._interval):
            return True
        return self._clock() - self._last >= self._interval

    def saved(self, stall: float, seconds: float) -> None:
        """A checkpoint has held up training for ``stall`` seconds; writing the one before took ``seconds``."""
        self._last = self._clock()
        if self._auto:
            self._interval = max(best_interval(stall, self._between_failures), seconds)

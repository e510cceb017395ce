"""What is to become of steps whose loss is no number or far above the others, told from the losses alone."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Literal

__all__ = ["LossGuard", "Remedy"]

Remedy = Literal["ignore", "raise", "skip", "rollback"]

WINDOW = 50
"""Losses that say what is usual; with fewer than half as many nothing is a spike."""


class LossGuard:
    """The same on every rank, since all see the same losses in the same order.

    A spike is a loss that lies ``size`` times as far above the median of the last 50 as these lie from it, by their
    median; a distance below a thousandth of the median counts as that.
    """

    def __init__(self) -> None:
        self._usual: deque[float] = deque(maxlen=WINDOW)
        self._remedied = 0
        self._furthest = -1

    @property
    def losses(self) -> tuple[float, ...]:
        """Those of the last steps that were applied."""
        return tuple(self._usual)

    def resume(self, losses: Sequence[float]) -> None:
        """Go by these losses from now on."""
        self._usual = deque(losses, WINDOW)

    def spike(self, loss: float, size: float) -> str:
        """How far a loss is above the usual, empty unless it is a spike."""
        if len(self._usual) < WINDOW // 2:
            return ""
        middle = median(self._usual)
        distance = max(median(abs(value - middle) for value in self._usual), abs(middle) / 1000)
        if loss - middle <= size * distance:
            return ""
        times = (loss - middle) / distance
        return f"{times:.0f} times as far above the median of the last ones, {middle:.4g}, as these"

    def applied(self, step: int, loss: float) -> None:
        """A step has been applied, the first of which has the number 0."""
        if math.isfinite(loss):
            self._usual.append(loss)
        if step > self._furthest:
            self._remedied = 0

    def remedied(self, step: int, limit: int) -> bool:
        """Whether one more may be skipped or rolled back, here: the limit holds until a later one is applied."""
        self._furthest = max(self._furthest, step)
        self._remedied += 1
        return self._remedied <= limit

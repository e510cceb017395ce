"""What is known of a training step on every rank without asking."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipeline.agreement import Closing
from pipeline.verdict import Verdict

__all__ = ["StepStats", "stats_of"]


@dataclass(frozen=True, slots=True)
class StepStats:
    """Seconds of the last training step, fractions of them, and norms."""

    seconds: float
    bubble: float
    gradient_norm: float
    skipped: bool
    """Whether nothing was updated: gradients overflowed in fp16, or the loss was not what it should be."""
    layer_norms: tuple[float, ...]
    """The norm of each layer's gradients, 0 where it has none; tied parameters count to their first layer."""


def stats_of(closing: Closing, verdict: Verdict, ranks: int, scale: float) -> StepStats:
    """The statistics of a step that was computed with this loss scale."""
    bubble = 1 - sum(closing.busy) / (closing.span * ranks)
    norms = tuple(math.sqrt(square) / scale for square in closing.squared_norms)
    return StepStats(closing.span, bubble, verdict.norm, verdict.action != "apply", norms)

"""The factor by which losses are multiplied so that fp16 gradients neither vanish nor overflow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from pipeline.config import PipelineConfig

__all__ = ["LossScale", "Scaling", "scaling_of"]


@dataclass(frozen=True, slots=True)
class Scaling:
    """How the scale moves, with DeepSpeed's meaning of each number.

    It doubles after every ``window`` steps without overflow since the last one that overflowed, and then as many more
    overflows are let pass as ``hysteresis`` says before it halves: the first of two costs a step only.  It never falls
    below ``minimum``.  Not ``dynamic``: it stays what it is.
    """

    dynamic: bool = True
    window: int = 1000
    hysteresis: int = 2
    minimum: float = 1.0


@dataclass(frozen=True, slots=True)
class LossScale:
    """The scale of the next step, and what moves it."""

    value: float
    good_steps: int = 0
    """Steps without overflow since the last overflow."""
    hysteresis: int = 2
    """One more than the overflows that are still let pass."""
    skipped: int = 0
    """Steps that have overflowed so far."""

    def after(self, overflow: bool, how: Scaling) -> LossScale:
        """The scale after one more step."""
        if not overflow:
            good = self.good_steps + 1
            grows = how.dynamic and good > how.window and (good - 1) % how.window == 0
            return replace(
                self,
                value=2 * self.value if grows else self.value,
                good_steps=good,
                hysteresis=how.hysteresis if grows else self.hysteresis,
            )
        halves = how.dynamic and self.hysteresis == 1
        return LossScale(
            value=max(self.value / 2, how.minimum) if halves else self.value,
            good_steps=0,
            hysteresis=max(self.hysteresis - 1, 1),
            skipped=self.skipped + 1,
        )


def scaling_of(config: PipelineConfig, types: Sequence[torch.dtype | None]) -> tuple[LossScale | None, Scaling]:
    """The first step's scale and how it moves; no scale where no layer computes in fp16."""
    dynamic = config.loss_scale == "dynamic"
    how = Scaling(dynamic, config.loss_scale_window, config.loss_scale_hysteresis, config.loss_scale_minimum)
    if torch.float16 not in types:
        return None, how
    first = config.loss_scale_initial if how.dynamic else float(config.loss_scale)
    return LossScale(first, hysteresis=how.hysteresis), how

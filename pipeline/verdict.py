"""What becomes of a training step whose gradients are there: it is applied, skipped, or refused."""

from __future__ import annotations

import math
from typing import NamedTuple

from pipeline.agreement import Closing
from pipeline.config import PipelineConfig
from pipeline.precision.loss_scale import LossScale, Scaling
from pipeline.update import clipping_factor

__all__ = ["Verdict", "judge"]


class Verdict(NamedTuple):
    """``norm`` is that of the gradients as they would be without a loss scale, and ``factor`` what the gradients that
    are there are to be multiplied by before the update.  ``refusal`` says why there is none, ``skipped`` that there is
    none and all is well; ``scale`` is that of the next step."""

    norm: float
    factor: float
    skipped: bool
    refusal: str
    scale: LossScale | None


def judge(
    closing: Closing, step: int, config: PipelineConfig, scale: LossScale | None, how: Scaling, layers: tuple[str, ...]
) -> Verdict:
    """The same verdict on every rank, since all judge by the same numbers; ``layers`` are their names."""
    used = 1.0 if scale is None else scale.value
    loss, norm = float(closing.loss), closing.gradient_norm / used
    finite = math.isfinite(loss) and math.isfinite(norm)
    factor = clipping_factor(norm, config.gradient_clipping) / used
    if scale is None:
        refused = not finite and config.nonfinite_loss == "raise"
        return Verdict(norm, factor, False, _refusal(closing, step, loss, norm, layers, "") if refused else "", None)
    following = scale.after(not finite, how)
    lowest = how.dynamic and scale.value <= how.minimum and scale.hysteresis == 1
    if not finite and lowest and config.nonfinite_loss == "raise":
        what = f", though the loss scale is at its minimum of {scale.value:g}"
        return Verdict(norm, factor, False, _refusal(closing, step, loss, norm, layers, what), following)
    return Verdict(norm, factor, not finite, "", following)


def _refusal(closing: Closing, step: int, loss: float, norm: float, layers: tuple[str, ...], what: str) -> str:
    return (
        f"the loss of step {step} is {loss} and the norm of its gradients {norm}{what}; nothing was updated. "
        f"{_where(closing, layers)}Lower the learning rate, set gradient_clipping, or set nonfinite_loss = "
        '"ignore" to go on regardless'
    )


def _where(closing: Closing, layers: tuple[str, ...]) -> str:
    """Where it began, as far as the numbers at the end of the step show."""
    if closing.nonfinite_loss is not None:
        return f"The first loss that is no finite number is that of micro-batch {closing.nonfinite_loss}. "
    for layer in reversed(range(len(closing.squared_norms))):
        if not math.isfinite(closing.squared_norms[layer]):
            return f"On the way back the first gradients that are not finite are those of layer {layers[layer]}. "
    return ""

"""What becomes of a training step whose gradients are there: it is applied, skipped, refused, or training goes back."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from pipeline.agreement import Closing
from pipeline.config import PipelineConfig
from pipeline.errors import LossSpike, NonFiniteLoss, PipelineError
from pipeline.guard import LossGuard, Remedy
from pipeline.precision.loss_scale import LossScale, Scaling
from pipeline.update import clipping_factor

__all__ = ["Verdict", "judge"]


class Verdict(NamedTuple):
    """``norm`` is that of the gradients as they would be without a loss scale, and ``factor`` what the gradients that
    are there are to be multiplied by before the update.  ``text`` says what is wrong with the step, empty where it is
    applied or gradients have only overflowed, and ``refusal`` is what to raise for it; ``scale`` is that of the next
    step."""

    norm: float
    factor: float
    action: Literal["apply", "raise", "skip", "rollback"]
    text: str
    scale: LossScale | None
    refusal: PipelineError | None = None


def judge(
    closing: Closing,
    step: int,
    config: PipelineConfig,
    scale: LossScale | None,
    how: Scaling,
    layers: tuple[str, ...],
    guard: LossGuard,
) -> Verdict:
    """The same verdict on every rank, since all judge by the same numbers; ``layers`` are their names."""
    used = 1.0 if scale is None else scale.value
    loss, norm = float(closing.loss), closing.gradient_norm / used
    finite = math.isfinite(loss) and math.isfinite(norm)
    factor = clipping_factor(norm, config.gradient_clipping) / used
    following = None if scale is None else scale.after(not finite, how)
    if finite:
        found = guard.spike(loss, config.loss_spike_size) if config.loss_spike != "ignore" else ""
        text = f"the loss of step {step} is {loss:.4g}, {found}" if found else ""
        return _remedied(Verdict(norm, factor, "apply", text, following), LossSpike, step, config, guard)
    what = ""
    if scale is not None:
        if config.nonfinite_loss == "ignore" or scale.value > how.minimum or scale.hysteresis > 1 or not how.dynamic:
            return Verdict(norm, factor, "skip", "", following)
        what = f", though the loss scale is at its minimum of {scale.value:g}"
    text = f"the loss of step {step} is {loss} and the norm of its gradients {norm}{what}{_where(closing, layers)}"
    return _remedied(Verdict(norm, factor, "apply", text, following), NonFiniteLoss, step, config, guard)


def _remedied(
    verdict: Verdict, error: type[PipelineError], step: int, config: PipelineConfig, guard: LossGuard
) -> Verdict:
    """What the settings want done about what is wrong with a step, if anything is."""
    name = "nonfinite_loss" if error is NonFiniteLoss else "loss_spike"
    wanted: Remedy = getattr(config, name)
    if not verdict.text or wanted == "ignore":
        return verdict._replace(text="")
    if wanted != "raise" and guard.remedied(step, config.loss_attempts):
        return verdict._replace(action=wanted)
    limit = "" if wanted == "raise" else "No later step was reached in as many attempts as loss_attempts allows. "
    advice = f'Lower the learning rate, set gradient_clipping, or set {name} = "ignore" to go on regardless'
    return verdict._replace(action="raise", refusal=error(f"{verdict.text}; nothing was updated. {limit}{advice}"))


def _where(closing: Closing, layers: tuple[str, ...]) -> str:
    """Where it began, as far as the numbers at the end of the step show."""
    if closing.nonfinite_loss is not None:
        return f"; the first loss that is no finite number is that of micro-batch {closing.nonfinite_loss}"
    for layer in reversed(range(len(closing.squared_norms))):
        if not math.isfinite(closing.squared_norms[layer]):
            return f"; on the way back the first gradients that are not finite are those of layer {layers[layer]}"
    return ""

"""Types of layers that change while training runs: away from fp16 where it overflows, to bf16 where that is faster."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from pipeline.agreement import Closing
from pipeline.config import PipelineConfig
from pipeline.module import PipelineModule

__all__ = ["AdaptivePrecision", "first_overflow"]


def first_overflow(closing: Closing) -> int | None:
    """The layer whose gradients were the first to be no finite numbers, on the way back from losses that all are."""
    if closing.nonfinite_loss is not None:
        return None
    layers = reversed(range(len(closing.squared_norms)))
    return next((layer for layer in layers if not math.isfinite(closing.squared_norms[layer])), None)


class AdaptivePrecision:
    """Decides from the ends of steps, the same on every rank.

    A layer in fp16 that is the first to overflow more than ``precision_overflows`` times in ``precision_window`` steps
    computes in fp32 for the next ``precision_rest`` steps.  Layers that are ``faster`` in bf16 do so from the first
    window without an overflow on.  Tied layers go together.
    """

    def __init__(self, config: PipelineConfig, module: PipelineModule, types: Sequence[torch.dtype | None]) -> None:
        self._base = config.precision
        self._limit = config.precision_overflows
        self._window, self._rest = config.precision_window, config.precision_rest
        self._fp16 = {layer for layer, dtype in enumerate(types) if dtype is torch.float16}
        self._names = [f"layer {index} ({module.type_of(index)})" for index in range(len(module))]
        ties = [{use.layer for use in tie.uses} for tie in module.ties()]
        self._together = [sorted({i}.union(*(tie for tie in ties if i in tie))) for i in range(len(module))]
        self._step = 0
        self._quiet = 0  # steps since the last overflow
        self._overflows: dict[int, list[int]] = {}  # by layer, the steps of the last window
        self._until: dict[int, int] = {}  # by layer that computes in fp32, the step before which it does
        self._faster: tuple[int, ...] = ()
        self._lowered = False
        self._told: set[int] = set()
        self.notes: list[str] = []

    @property
    def precision(self) -> tuple[tuple[str, str], ...]:
        """The setting as it is now: the one that was given, and what goes over it."""
        # What is in bf16 stands between others that have to cast what comes from it.
        wide = [("*", "fp32")] if self._lowered else []
        lowered = [(str(layer), "bf16") for layer in self._faster if self._lowered]
        return (*wide, *self._base, *lowered, *((str(layer), "fp32") for layer in sorted(self._until)))

    def may_lower(self, faster: Sequence[int]) -> None:
        """These layers were measured to be faster in bf16."""
        self._faster = tuple(layer for layer in faster if all(other in faster for other in self._together[layer]))

    def observe(self, overflowed: int | None) -> bool:
        """A step has ended, in which the gradients of this layer were the first to overflow, if any did.

        True where ``precision`` is another now.
        """
        before, step = self.precision, self._step
        self._step += 1
        self._quiet = 0 if overflowed is not None else self._quiet + 1
        for layer in [layer for layer, until in self._until.items() if until <= self._step]:
            del self._until[layer]
        if overflowed is not None and self._limit is not None and overflowed in self._fp16:
            self._count(overflowed, step, self._limit)
        if self._faster and not self._lowered and self._quiet >= self._window:
            self._lowered = True
            names = ", ".join(self._names[layer] for layer in self._faster)
            self.notes.append(f"precision: {names} in bf16 from now on, which was measured to be faster")
        return self.precision != before

    def _count(self, layer: int, step: int, limit: int) -> None:
        recent = [other for other in self._overflows.get(layer, []) if other > step - self._window] + [step]
        self._overflows[layer] = recent
        if len(recent) <= limit:
            return
        self._overflows[layer] = []
        for other in self._together[layer]:
            self._until[other] = self._step + self._rest
        if layer not in self._told:
            self._told.add(layer)
            self.notes.append(
                f"precision: {self._names[layer]} overflowed {len(recent)} times in {self._window} steps, and computes "
                f"in fp32 for {self._rest} steps, as it will whenever that happens again"
            )

    def state_dict(self) -> dict[str, Any]:
        """Numbers and lists only."""
        return {
            "step": self._step,
            "quiet": self._quiet,
            "overflows": {layer: list(steps) for layer, steps in self._overflows.items()},
            "until": dict(self._until),
            "faster": list(self._faster),
            "lowered": self._lowered,
            "told": sorted(self._told),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._step, self._quiet = state["step"], state["quiet"]
        self._overflows = {layer: list(steps) for layer, steps in state["overflows"].items()}
        self._until, self._faster = dict(state["until"]), tuple(state["faster"])
        self._lowered, self._told = state["lowered"], set(state["told"])

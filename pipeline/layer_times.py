"""What each layer takes while training runs: stamps around its passes, and the median of every step."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from partition.drift import Seconds
from pipeline.device import synchronise, uses_streams
from pipeline.layer import Layer

__all__ = ["LayerTimes"]

_METHODS = ("forward", "backward", "weight_gradients")

_APART = 10
"""Where the clock has to wait for the device, one step of so many is watched."""


class LayerTimes:
    """The last ``window`` steps that were watched, each by layer.

    A watched layer's methods are wrapped on the instance, so that others cost nothing.  Where work is queued on a
    device, a stamp must wait for it; there only some steps are watched.
    """

    def __init__(self, device: torch.device, window: int) -> None:
        self.steps: deque[dict[int, Seconds]] = deque(maxlen=window)
        self._device = device
        self._queued = uses_streams(device)
        self._step = 0
        self._on = True
        self._loss = -1
        self._layers: tuple[Layer, ...] = ()
        self._passes: dict[int, tuple[list[float], list[float], list[float]]] = {}

    def watch(self, layers: Iterable[Layer], loss: int) -> None:
        """Time these layers from now on, in place of those before; number ``loss`` counts to the one before it."""
        self.stop()
        self._loss = loss
        self._layers = tuple(layers)
        for layer in self._layers:
            passes = self._passes.setdefault(layer.index, ([], [], []))
            for name, found in zip(_METHODS, passes, strict=True):
                each = name == _METHODS[-1]  # one call for several micro-batches
                setattr(layer, name, self._timed(getattr(layer, name), found, each=each))

    def stop(self) -> None:
        """Let the layers be as they were."""
        for layer in self._layers:
            for name in _METHODS:
                vars(layer).pop(name, None)
        self.steps.clear()
        self._passes.clear()

    def _timed(self, method: Callable[..., Any], found: list[float], *, each: bool) -> Callable[..., Any]:
        clock, device = time.perf_counter, self._device

        def timed(*args: Any, **others: Any) -> Any:
            if not self._on:
                return method(*args, **others)
            if self._queued:
                synchronise(device)
            started = clock()
            result = method(*args, **others)
            if self._queued:
                synchronise(device)
            found.append((clock() - started) / (len(args) if each else 1))
            return result

        return timed

    def end_step(self) -> None:
        """A training step has ended."""
        if self._on:
            took = {layer: Seconds(*map(_median, passes)) for layer, passes in self._passes.items() if passes[0]}
            loss = took.pop(self._loss, None)
            if loss is not None and self._loss - 1 in took:
                took[self._loss - 1] = Seconds(*map(sum, zip(took[self._loss - 1], loss, strict=True)))
            self.steps.append(took)
        self.forget()
        self._step += 1
        self._on = not self._queued or self._step % _APART == 0

    def forget(self) -> None:
        """The step counts for nothing."""
        for passes in self._passes.values():
            for times in passes:
                times.clear()


def _median(times: Sequence[float]) -> float:
    return statistics.median(times) if times else 0.0

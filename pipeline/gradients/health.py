"""Layers whose gradients vanish or explode on the way back from the loss: the worst is named, once."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

__all__ = ["GradientHealth"]

WINDOW = 10
"""Steps over which the median counts: one odd batch says nothing."""
VANISHED, EXPLODED = 1e-6, 300.0
"""Norm of a layer's gradient over that of the last layer, the nearest to the loss.  Layers that differ in kind and size
differ by two orders of magnitude or so; what shrinks or grows from layer to layer soon differs by many."""


class GradientHealth:
    """Watches the norms that the end of every step tells anyway; ``names`` are those of the layers."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._ratios: dict[int, deque[float]] = {}
        self._told: set[bool] = set()  # by whether they have exploded

    def observe(self, squared_norms: Sequence[float]) -> str:
        """What to say after a step with these squared norms, one a layer; mostly nothing."""
        norms = {layer: math.sqrt(square) for layer, square in enumerate(squared_norms) if square > 0}
        if not norms or not all(map(math.isfinite, norms.values())):
            return ""
        last = max(norms)
        found: dict[bool, dict[int, float]] = {True: {}, False: {}}  # by whether it has exploded
        for layer, norm in norms.items():
            ratios = self._ratios.setdefault(layer, deque(maxlen=WINDOW))
            ratios.append(norm / norms[last])
            if len(ratios) == WINDOW:
                ratio = statistics.median(ratios)
                if not VANISHED <= ratio <= EXPLODED:
                    found[ratio > 1][layer] = ratio
        news = {exploded: layers for exploded, layers in found.items() if layers and exploded not in self._told}
        self._told |= news.keys()
        return " ".join(self._sentence(layers, last, exploded) for exploded, layers in news.items())

    def _sentence(self, layers: dict[int, float], last: int, exploded: bool) -> str:
        worst = max(layers, key=lambda layer: abs(math.log(layers[layer])))
        others = f", and {len(layers) - 1} more layers likewise" if len(layers) > 1 else ""
        what = "explode" if exploded else "vanish"
        remedy = (
            "set gradient_clipping, and begin with smaller weights"
            if exploded
            else "it hardly learns: begin with larger weights, add residual connections or norms, or give it a larger "
            "learning rate by param_groups"
        )
        return (
            f"the gradients of layer {self._names[worst]} {what}: their norm is {layers[worst]:.1e} of that of layer "
            f"{self._names[last]}, by the median of {WINDOW} steps{others}; {remedy}."
        )

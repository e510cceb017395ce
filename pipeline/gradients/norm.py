"""The norm of gradients that lie in vectors, summed in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.gradients.flat import FlatLayer


def squared_norm(flat: FlatLayer) -> Tensor:
    """The sum of the squares of a layer's gradients: 0-d, float64, on the layer's device; padding is 0 and adds 0."""
    total = torch.zeros((), dtype=torch.float64, device=flat.vectors[0].gradients.device if flat.vectors else None)
    for vector in flat.vectors:
        total += torch.linalg.vector_norm(vector.gradients, dtype=torch.float64).square()
    return total


def scale(flat: FlatLayer, factor: Tensor | float) -> None:
    """Multiply every gradient of a layer in place, as clipping by the global norm does."""
    for vector in flat.vectors:
        vector.gradients.mul_(factor)

"""Which weights of a layer get their gradient by W, which fell back to I, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Weight(NamedTuple):
    """A parameter of two or more dimensions; `reason` why its part of W is empty, "" where it is not.

    `operators` names the functions that took it and are not split, as far as the first micro-batch has shown.
    """

    name: str
    elements: int
    reason: str
    operators: tuple[str, ...]


class SplitReport(NamedTuple):
    """The weights of a layer, by what its first micro-batch has shown."""

    weights: tuple[Weight, ...]

    @property
    def split(self) -> tuple[str, ...]:
        """Names of the weights whose gradient W computes."""
        return tuple(weight.name for weight in self.weights if not weight.reason)

    @property
    def fallen_back(self) -> tuple[Weight, ...]:
        """The weights whose gradient is computed during I."""
        return tuple(weight for weight in self.weights if weight.reason)

    @property
    def share(self) -> float:
        """The part of the weights' elements that fell back, from 0 to 1."""
        elements = sum(weight.elements for weight in self.weights)
        return sum(weight.elements for weight in self.fallen_back) / elements if elements else 0.0


class ModelSplit(NamedTuple):
    """The reports of all layers that have weights, by the layers' names, in layer order."""

    layers: tuple[tuple[str, SplitReport], ...]

    @property
    def share(self) -> float:
        """The part of the elements of all weights that fell back, from 0 to 1."""
        weights = [weight for _, report in self.layers for weight in report.weights]
        elements = sum(weight.elements for weight in weights)
        return sum(weight.elements for weight in weights if weight.reason) / elements if elements else 0.0

    def __str__(self) -> str:
        """A line for each weight that fell back; empty where none did."""
        return "\n".join(
            f"layer {name}: {weight.name} gets its gradient in I, since {weight.reason}"
            + (f" (used by {', '.join(weight.operators)})" if weight.operators else "")
            for name, report in self.layers
            for weight in report.fallen_back
        )


def model_split(by_rank: Sequence[Mapping[int, tuple[str, SplitReport]]]) -> ModelSplit:
    """What the ranks of a pipeline tell, by the number of the layer; of two copies of a layer the first counts."""
    layers = {index: entry for rank in reversed(by_rank) for index, entry in rank.items() if entry[1].weights}
    return ModelSplit(tuple(layers[index] for index in sorted(layers)))

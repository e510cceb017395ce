"""Which weights of a layer get their gradient by W, which fell back to I, and why."""

from __future__ import annotations

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

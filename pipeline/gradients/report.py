"""Which weights of a layer get their gradient by W, which fell back to I, and why."""

from __future__ import annotations

from typing import NamedTuple


class FallenBack(NamedTuple):
    """A weight whose gradient is computed during I, so that its part of W is empty.

    `operators` names the functions that took it and are not split, as far as the first micro-batch has shown.
    """

    name: str
    elements: int
    reason: str
    operators: tuple[str, ...]


class SplitReport(NamedTuple):
    """The weights of a layer (parameters of two or more dimensions), by what its first micro-batch has shown.

    `share`: the part of their elements that fell back, from 0 to 1.
    """

    split: tuple[str, ...]
    fallen_back: tuple[FallenBack, ...]
    share: float

"""How long things take: the numbers that turn a schedule into a timeline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from schedules.errors import CostError

PerStage = float | Sequence[float] | NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds (or any unit of time) of the passes of one *stage*, and of one hop between ranks.

    F, I and W are one number for all stages or one number a stage; a full backward B takes I + W. With v
    stages a rank, a stage is 1/v of a rank's share: pass F=1/v to compare with papers that time a whole rank.
    ``hop`` delays the receiver's earliest start and occupies neither rank; inside a rank it is 0.
    """

    F: PerStage = 1.0
    I: PerStage = 1.0  # noqa: E741 - the field's own letter
    W: PerStage = 1.0
    hop: float = 0.0

    def __post_init__(self) -> None:
        for name in ("F", "I", "W"):
            object.__setattr__(self, name, _per_stage(name, getattr(self, name)))
        object.__setattr__(self, "hop", _number("hop", self.hop))

    def by_kind(self, num_stages: int) -> NDArray[np.float64]:
        """The time of each kind on each stage, shape (4, num_stages), kinds in the order F, B, I, W.

        Raises CostError when numbers were given for another number of stages.
        """
        forward, input_grad, weight_grad = (_spread(name, getattr(self, name), num_stages) for name in ("F", "I", "W"))
        return np.stack([forward, input_grad + weight_grad, input_grad, weight_grad])


def _per_stage(name: str, value: PerStage) -> PerStage:
    if isinstance(value, Sequence | np.ndarray) and not isinstance(value, str):
        return tuple(_number(f"{name}[{stage}]", one) for stage, one in enumerate(value))
    return _number(name, value)


def _number(name: str, value: object) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise CostError(f"Costs.{name} is {value!r}; it must be a finite number of seconds, 0 or more")
    return number


def _spread(name: str, value: PerStage, num_stages: int) -> NDArray[np.float64]:
    if isinstance(value, float):
        return np.full(num_stages, value)
    if len(value) != num_stages:
        raise CostError(
            f"Costs.{name} has {len(value)} numbers, the schedule has {num_stages} stages; "
            f"give one number for all stages or {num_stages} numbers"
        )
    return np.array(value, dtype=np.float64)

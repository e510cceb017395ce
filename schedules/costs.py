"""How long things take and how large they are: the numbers that turn a schedule into a timeline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from schedules.errors import CostError

Each = float | Sequence[float] | NDArray[np.float64]
"""One number for all stages (or ranks), or one for each."""

PER_STAGE = (
    "F", "I", "W", "kept", "output_bytes", "activation_bytes", "weight_grad_bytes", "unshard", "reshard", "reduce",
)  # fmt: skip
PER_RANK = ("speed", "step")


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds (or any unit of time) of the passes of one *stage*, and of one hop between ranks.

    F, I and W are one number for all stages or one number a stage; a full backward B takes I + W. With v
    stages a rank, a stage is 1/v of a rank's share: pass F=1/v to compare with papers that time a whole rank.
    ``hop`` delays the receiver's earliest start and occupies neither rank; inside a rank it is 0.

    The rest is for those who want it: without it messages, reductions and the step take no time, and all ranks
    are equally fast.
    """

    F: Each = 1.0
    I: Each = 1.0  # noqa: E741 - the field's own letter
    W: Each = 1.0
    hop: float = 0.0
    kept: Each = 1.0
    """Which part of a stage's activations stays from I to W; the rest is freed with I. In bytes, ``weight_grad_bytes``
    says it."""
    bandwidth: float = math.inf
    """Bytes a second from one rank to another: a message of n bytes is there after hop + n / bandwidth."""
    contention: bool = False
    """Whether messages from one rank to the same other one have to wait for each other."""
    output_bytes: Each = 0.0
    """What a stage sends for a micro-batch, and gets back as a gradient."""
    activation_bytes: Each = 0.0
    """What a stage keeps of a micro-batch from F to I."""
    weight_grad_bytes: Each = 0.0
    """What it keeps from I to W."""
    speed: Each = 1.0
    """Of each rank: at speed 0.5 its passes take twice as long."""
    unshard: Each = 0.0
    """Seconds to make a stage's parameters whole."""
    reshard: Each = 0.0
    reduce: Each = 0.0
    """Seconds to add up a stage's gradients over its replicas."""
    step: Each = 0.0
    """Seconds of the optimizer's step on each rank."""

    def __post_init__(self) -> None:
        for name in (*PER_STAGE, *PER_RANK):
            object.__setattr__(self, name, _each(name, getattr(self, name)))
        object.__setattr__(self, "hop", _number("hop", self.hop))
        if not (isinstance(self.bandwidth, int | float) and self.bandwidth > 0):
            raise CostError(f"Costs.bandwidth is {self.bandwidth!r}; it must be a number of bytes a second above 0")
        if np.max(self.kept) > 1:
            raise CostError(f"Costs.kept is {self.kept!r}; it is a part of the activations, set it to 1 or less")
        if np.min(self.speed) <= 0:
            raise CostError(f"Costs.speed is {self.speed!r}; a rank's speed must be above 0, 1 for the ordinary one")

    def divided(self, parts: int) -> Costs:
        """Of stages that are one of ``parts`` equal parts of the stages that these costs are of.

        Messages keep their size. Raises CostError where stages have costs of their own.
        """
        if parts == 1:
            return self
        per_part = tuple(name for name in PER_STAGE if name not in ("kept", "output_bytes"))
        several = [name for name in (*per_part, "kept", "output_bytes") if not isinstance(getattr(self, name), float)]
        if several:
            raise CostError(
                f"Costs.{several[0]} has a number for each stage, which cannot be divided by {parts}; give the costs "
                f"of the stages themselves, and set stages_per_rank to how many a rank holds"
            )
        return replace(self, **{name: getattr(self, name) / parts for name in per_part})

    def by_kind(self, num_stages: int) -> NDArray[np.float64]:
        """The time of each kind on each stage at speed 1, shape (4, num_stages), kinds in the order F, B, I, W.

        Raises CostError when numbers were given for another number of stages.
        """
        forward, input_grad, weight_grad = (self.per_stage(name, num_stages) for name in ("F", "I", "W"))
        return np.stack([forward, input_grad + weight_grad, input_grad, weight_grad])

    def seconds(self, rank_of_stage: Sequence[int], ranks: int) -> NDArray[np.float64]:
        """The same at the speed of the ranks that hold the stages."""
        speed = self.per_rank("speed", ranks)
        return self.by_kind(len(rank_of_stage)) / speed[list(rank_of_stage)]

    def per_stage(self, name: str, num_stages: int) -> NDArray[np.float64]:
        """One of the numbers that may differ between stages, for each of them. Raises CostError."""
        return _spread(name, getattr(self, name), num_stages, "stages")

    def per_rank(self, name: str, ranks: int) -> NDArray[np.float64]:
        """``speed`` or ``step`` of each rank. Raises CostError."""
        return _spread(name, getattr(self, name), ranks, "ranks")

    def travel(self, num_stages: int) -> NDArray[np.float64]:
        """How long the output of each stage is under way to another rank, and the gradient of it back."""
        return self.hop + self.per_stage("output_bytes", num_stages) / self.bandwidth

    @property
    def collectives(self) -> bool:
        """Whether making whole, reducing or the step takes any time."""
        return any(np.max(getattr(self, name), initial=0.0) > 0 for name in ("unshard", "reshard", "reduce", "step"))


def _each(name: str, value: Each) -> Each:
    if isinstance(value, Sequence | np.ndarray) and not isinstance(value, str):
        return tuple(_number(f"{name}[{place}]", one) for place, one in enumerate(value))
    return _number(name, value)


def _number(name: str, value: object) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise CostError(f"Costs.{name} is {value!r}; it must be a finite number, 0 or more")
    return number


def _spread(name: str, value: Each, number: int, what: str) -> NDArray[np.float64]:
    if isinstance(value, float):
        return np.full(number, value)
    if len(value) != number:
        raise CostError(
            f"Costs.{name} has {len(value)} numbers, the schedule has {number} {what}; "
            f"give one number for all {what} or {number} numbers"
        )
    return np.array(value, dtype=np.float64)

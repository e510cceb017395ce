"""The state of one step on one rank: everything keyed by stage and micro-batch, dropped when the step ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pipeline.batch import Item
from pipeline.exchange import Forms
from pipeline.layer import Gradients, Place
from pipeline.links.protocol import Pending
from pipeline.shapes import Value
from pipeline.stage import StagePass

__all__ = ["Failure", "Key", "Step"]

Key = tuple[int, int]  # stage, micro-batch


@dataclass(frozen=True, slots=True)
class Failure:
    """What stopped a rank from computing: its own error, or None when a peer had failed before it."""

    action: str
    layer: str
    error: Exception | None
    time: float


@dataclass(slots=True)
class Step:
    """One training, evaluation or inference step.

    ``items`` and the losses exist only on ranks that hold the first or last stage of a route.  ``shares`` are the
    micro-batches' weights over the total weight of the step, ``seeds`` the gradients of their losses: shares times the
    loss scale.
    """

    number: int
    train: bool
    with_loss: bool
    items: Sequence[Item]
    places: Sequence[Place]
    shares: Sequence[float]
    seeds: Sequence[float]
    forms: Forms
    values: dict[Key, Value] = field(default_factory=dict)  # inputs of a stage, ready to be used
    gradients: dict[Key, Gradients] = field(default_factory=dict)  # of a stage's output, ready to be used
    passes: dict[Key, StagePass] = field(default_factory=dict)
    leaving_values: dict[Key, Value] = field(default_factory=dict)  # results that wait for their SEND
    leaving_gradients: dict[Key, Gradients] = field(default_factory=dict)
    sending: dict[tuple[bool, int, int], list[Pending]] = field(default_factory=dict)  # forward?, stage, micro-batch
    losses: dict[int, Tensor] = field(default_factory=dict)  # by micro-batch, detached
    outputs: dict[int, Any] = field(default_factory=dict)  # by micro-batch, only where they were asked for
    added: dict[str, dict[int, Tensor]] = field(default_factory=dict)  # added losses by name and micro-batch
    rooted: bool = False  # whether a gradient starts at some loss here
    failure: Failure | None = None

"""Layers that save one activation a micro-batch, and how many of these live: by their memory, not by bookkeeping."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from itertools import accumulate, takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeline import LayerSpec, PipelineModule, initialize
from pipeline.engine import Engine
from schedules import Schedule, simulate

__all__ = ["Course", "Living", "Saving", "courses", "engine_of"]


class Living:
    """The activations of one rank: +1 where one is made, -1 where its memory is given back, in this order."""

    def __init__(self) -> None:
        self.changes: list[int] = []

    def add(self, tensor: Tensor) -> None:
        """Count a tensor until nobody holds its memory any more: no graph, queue, message or view."""
        self.changes.append(1)
        weakref.finalize(tensor.untyped_storage(), self.changes.append, -1).atexit = False


class Saving(nn.Module):
    """tanh and a linear layer, whose input lives until the gradient of the weights is computed: to the end of B or W.

    That input is neither what enters the layer nor what leaves it, which neighbours hold as well.  An item is one row,
    of which the first layer makes many, so that items take no memory that counts.
    """

    def __init__(self, rows: int, width: int, living: Living) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.rows = rows
        self.living = living

    def forward(self, x: Tensor) -> Tensor:
        saved = x.expand(self.rows, -1).tanh()
        self.living.add(saved)
        y: Tensor = self.linear(saved)
        return y


def engine_of(settings: Mapping[str, Any], layers: int, living: Living, rows: int = 1, width: int = 4) -> Engine:
    """An engine over so many of these layers."""
    module = PipelineModule(
        [LayerSpec(Saving, rows, width, living) for _ in range(layers)], lambda output, target: output.square().mean()
    )
    config = {"partition": "uniform", "device": "cpu", **settings}
    return initialize(module, config=config, optimizer=torch.optim.SGD)


def step(engine: Engine, width: int = 4) -> None:
    """One training step on tiny items."""
    engine.train_batch([(torch.ones(1, width), None)] * engine.config.micro_batches)


class Course(NamedTuple):
    """How many activations one rank holds after every change of their number: as counted, and as simulated.

    In micro-batches of the rank's share of the model: on one of its v stages a micro-batch counts 1 / v.
    """

    counted: tuple[float, ...]
    simulated: tuple[float, ...]
    peak: float
    """The simulator's peak of this rank."""

    @property
    def agreed(self) -> int:
        """How many changes, from the first, are the simulated ones."""
        pairs = zip(self.counted, self.simulated, strict=False)
        return sum(takewhile(bool, (ours == theirs for ours, theirs in pairs)))


def courses(settings: Mapping[str, Any], layers: int, steps: int = 2) -> list[Course]:
    """The course of each step on the calling rank, with a layer for each group of layers.  Collective."""
    living = Living()
    engine = engine_of(settings, layers, living)
    if engine.schedule.num_layer_groups != layers:
        raise ValueError(f"{layers} layers for {engine.schedule.num_layer_groups} groups of layers")
    found = []
    for _ in range(steps):
        living.changes.clear()
        step(engine)
        found.append(_course(engine.schedule, engine.mesh.pipe_rank, living.changes))
    return found


def _course(schedule: Schedule, rank: int, changes: Sequence[int]) -> Course:
    timeline = simulate(schedule)
    share = schedule.ranks / schedule.num_layer_groups
    # In whole layers, so that no rounding stands between the two.
    levels = [round(live / share) for live in timeline.memory(rank)[1].tolist()]
    changed = [live for before, live in zip([-1, *levels], levels, strict=False) if live != before]
    counted = accumulate(changes, initial=0)
    return Course(
        tuple(share * live for live in counted),
        tuple(share * live for live in changed),
        timeline.peak_activations[rank],
    )

"""Recomputed layers run once more a micro-batch, in its backward; all others once, and none more often."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from pipeline import LayerSpec, PipelineModule, initialize, run_local
from schedules import Action, Kind, Schedule, build
from schedules.action import actions_of
from tests.pipeline.layouts import training_schedules
from tests.pipeline.witness import Witness

RANKS, MICRO_BATCHES, LAYERS_A_GROUP = 4, 5, 2

Run = tuple[int, Action]
"""A layer, and the pass in which its forward ran."""


class Noting(nn.Module):
    """Notes when its forward runs."""

    def __init__(self, index: int, moments: list[tuple[int, float]]) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.index = index
        self.moments = moments

    def forward(self, x: Tensor) -> Tensor:
        self.moments.append((self.index, time.perf_counter()))
        y: Tensor = self.inner(x).tanh()
        return y


class Runs(NamedTuple):
    """Of one rank in one step, in order."""

    found: list[Run]
    expected: list[Run]


def runs(schedule: Schedule, recompute: str | tuple[int, ...], again: Collection[int]) -> list[Runs]:
    """Of each of two steps on the calling rank; layers of ``again`` are to run again.  Collective."""
    moments: list[tuple[int, float]] = []
    module = PipelineModule(
        [LayerSpec(Noting, index, moments) for index in range(LAYERS_A_GROUP * schedule.num_layer_groups)],
        lambda y, target: y.square().mean(),
    )
    config = {
        "schedule": schedule.name,
        "micro_batches": MICRO_BATCHES,
        "stages_per_rank": schedule.num_stages // RANKS,
        "partition": "uniform",
        "recompute": recompute,
        "device": "cpu",
    }
    engine = initialize(module, config=config, optimizer=torch.optim.SGD)
    assert engine.schedule == schedule
    witness = Witness(engine)
    expected = []
    for action in (a for entry in schedule.rows[engine.mesh.pipe_rank] for a in actions_of(entry)):
        of_stage = engine.plan.partition.layers_of(schedule.layer_group_of_stage[action.stage])
        if action.kind is Kind.F:
            expected += [(layer, action) for layer in of_stage]
        elif action.kind is not Kind.W:
            expected += [(layer, action) for layer in reversed(of_stage) if layer in again]
    steps = []
    for _ in range(2):
        moments.clear()
        engine.train_batch([(torch.ones(2, 3), None)] * MICRO_BATCHES)
        calls = witness.account().calls
        found = [(layer, call.action) for layer, t in moments for call in calls if call.start <= t <= call.end]
        assert len(found) == len(moments)
        steps.append(Runs(found, expected))
    return steps


@pytest.mark.parametrize("recompute", ["none", "every", "every:2", "every:3", (1, 2)], ids=str)
@pytest.mark.parametrize("name", training_schedules())
def test_forwards_of_a_micro_batch(name: str, recompute: str | tuple[int, ...]) -> None:
    schedule = build(name, ranks=RANKS, micro_batches=MICRO_BATCHES)
    layers = LAYERS_A_GROUP * schedule.num_layer_groups
    every = {"none": range(0), "every": range(layers), "every:2": range(0, layers, 2), "every:3": range(0, layers, 3)}
    again = recompute if isinstance(recompute, tuple) else every[recompute]
    by_rank = run_local(runs, RANKS, schedule, recompute, again, timeout=60.0)
    for steps in by_rank:
        for found, expected in steps:
            assert found == expected
    # Of all ranks together: each layer once or twice for each micro-batch, whichever copy of it a route takes.
    counts = [sum(layer == index for steps in by_rank for layer, _ in steps[0].found) for index in range(layers)]
    assert counts == [MICRO_BATCHES * (2 if index in again else 1) for index in range(layers)]

"""Layouts that change while training runs: the same bits as if they had not, from any layout to any other."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from pipeline import initialize
from pipeline.batch import Item
from pipeline.migrate import Moved
from tests.pipeline.layouts import Layout
from tests.pipeline.models import Recipe, adamw, micro_batches, restless, transformer
from tests.pipeline.reference import Case, Outcome
from tests.pipeline.running import copies_agree, everywhere, same_bits

BATCH = 4  # micro-batches of a step, over all pipelines


@dataclass(frozen=True)
class Place:
    """A layout on a fixed number of ranks, as settings."""

    schedule: str = "1f1b"
    stages_per_rank: int = 1
    data_parallel: int = 1
    zero: int = 0
    partition: str | tuple[int, ...] = "uniform"
    recompute: str = "none"

    def settings(self) -> dict[str, Any]:
        return {**vars(self), "micro_batches": BATCH // self.data_parallel}


def items(step: int, data_rank: int, data: int) -> list[Item]:
    each = BATCH // data
    return micro_batches(BATCH, step)[data_rank * each : (data_rank + 1) * each]


def journey(case: Case, places: list[Place], steps: int, others: Mapping[str, Any]) -> tuple[Outcome, list[Moved]]:
    """Train on the calling rank, some steps in each of these layouts."""
    settings = {**places[0].settings(), "device": "cpu", "timeout": 30.0, **others}
    engine = initialize(case.model(), config=settings, optimizer=case.optimizer)
    before, losses, norms, moved = engine.full_state_dict(), [], [], []
    for number, place in enumerate(places):
        if number:
            now, then = place.settings(), places[number - 1].settings()
            moved.append(engine.relayout(**{name: v for name, v in now.items() if v != then[name]}))
        for _ in range(steps):
            mesh = engine.mesh
            losses.append(engine.train_batch(items(engine.steps, mesh.data_rank, mesh.data)).item())
            norms.append(engine.stats.gradient_norm if engine.stats else 0.0)
    after = engine.full_state_dict()
    assert copies_agree(engine, after)
    return Outcome(before, tuple(losses), tuple(norms), (), after), moved


def travel(case: Case, ranks: int, places: list[Place], steps: int = 2, **others: Any) -> tuple[Outcome, list[Moved]]:
    processes = others.pop("processes", False)
    found = everywhere(journey, ranks, case, places, steps, others, processes=processes)
    assert all(outcome.losses == found[0][0].losses for outcome, _ in found)
    outcome, moved = found[0]
    return outcome, moved


def close(found: Outcome, expected: Outcome, tolerance: float = 1e-11) -> bool:
    pairs = [(found.after[name], tensor) for name, tensor in expected.after.items()]
    losses = zip(found.losses, expected.losses, strict=True)
    return all(abs(a - b) <= tolerance * abs(b) for a, b in losses) and all(
        float((a - b).abs().max()) <= tolerance * max(1.0, float(b.abs().max())) for a, b in pairs
    )


def case_of(recipe: Recipe, optimizer: Any = restless) -> Case:
    return Case(partial(transformer, recipe), partial(micro_batches, BATCH), 2, optimizer)


def test_layers_that_change_places_take_everything_with_them() -> None:
    case = case_of(Recipe())
    there = [Place(partition=(0, 4, 12)), Place(partition=(0, 8, 12)), Place(partition=(0, 6, 12))]
    found, moved = travel(case, 2, there)
    stayed, _ = travel(case, 2, [there[0]] * 3)
    assert same_bits(found, stayed)
    assert [m.layers for m in moved] == [(4, 5, 6, 7), (6, 7)]


def test_nothing_moves_where_nothing_has_to() -> None:
    found, moved = travel(case_of(Recipe()), 2, [Place(), Place(schedule="zb-h1"), Place(schedule="gpipe", recompute="every")])
    assert [m.bytes for m in moved] == [0, 0]
    assert same_bits(found, travel(case_of(Recipe()), 2, [Place()] * 3)[0])


@pytest.mark.parametrize("recipe", [Recipe(), Recipe(tied=False), Recipe(tied=False, frozen=(0, 3, 4))], ids=str)
def test_from_shape_to_shape(recipe: Recipe) -> None:
    case = case_of(recipe)
    places = [Place(), Place("interleaved-1f1b", 2), Place("zb-v", 2), Place("zb-h1"), Place("interleaved-1f1b", 3)]
    found, _ = travel(case, 3, places, steps=1)
    assert same_bits(found, travel(case, 3, [Place()] * 5, steps=1)[0])

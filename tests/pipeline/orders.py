"""Orders that no schedule of the package has, but that the engine must run as well: declared for a test only.

split        1F1B in which each W runs one micro-batch later than it could
vee          two stages a rank, the second half of the model on the way back: the loss is on the rank of the inputs
late-first   micro-batches in pairs, the second of each before the first
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from schedules import Action, Kind, Shape, registry, schedule
from schedules.placement import Placement
from schedules.registry import Numbers, Stages

SPLIT = ("split", "vee")


def declare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make them known until the test ends."""
    monkeypatch.setattr(registry, "_FACTS", dict(registry._FACTS))
    monkeypatch.setattr(registry, "_NAME_OF", dict(registry._NAME_OF))
    schedule("split", peak=_all, splits_backward=True)(split)
    schedule("vee", peak=_all, splits_backward=True, placement=there_and_back, stages_per_rank=Stages(2, 2, 2))(vee)
    schedule("late-first", peak=_all)(late_first)
    even = Numbers("a multiple of ranks", lambda ranks, stages_per_rank, micro_batches: micro_batches % ranks == 0)
    schedule("in-rounds", peak=_all, micro_batches=even)(in_rounds)


def _all(ranks: int, stages_per_rank: int, micro_batches: int) -> float:
    return micro_batches


def split(shape: Shape) -> Iterator[list[Action]]:
    """1F1B with input gradients, weights follow one micro-batch behind."""
    m = shape.micro_batches
    for rank in range(shape.ranks):
        ahead = min(shape.ranks - rank, m)
        row = [Action(rank, Kind.F, i) for i in range(ahead)]
        for i in range(m):
            row.append(Action(rank, Kind.I, i))
            row += [Action(rank, Kind.W, i - 1)] * (i > 0)
            row += [Action(rank, Kind.F, i + ahead)] * (i + ahead < m)
        yield [*row, Action(rank, Kind.W, m - 1)]


def there_and_back(ranks: int, stages_per_rank: int) -> Placement:
    """Stages 0 1 2 3 on ranks 0 1 1 0."""
    stages = tuple(range(2 * ranks))
    return Placement(tuple(min(stage, 2 * ranks - 1 - stage) for stage in stages), (stages,), stages)


def vee(shape: Shape) -> Iterator[list[Action]]:
    """All forwards, all input gradients, all weights."""
    numbers = range(shape.micro_batches)
    for rank in range(shape.ranks):
        first, second = shape.stages_of_rank(rank)
        yield [
            *(Action(stage, Kind.F, i) for stage in (first, second) for i in numbers),
            *(Action(stage, Kind.I, i) for stage in (second, first) for i in numbers),
            *(Action(stage, Kind.W, i) for stage in (second, first) for i in numbers),
        ]


def late_first(shape: Shape) -> Iterator[list[Action]]:
    """1, 0, 3, 2, ...: forwards and backwards."""
    m = shape.micro_batches
    order = [i for pair in range(0, m, 2) for i in (pair + 1, pair) if i < m]
    for rank in range(shape.ranks):
        yield [Action(rank, kind, i) for kind in (Kind.F, Kind.B) for i in order]


def in_rounds(shape: Shape) -> Iterator[list[Action]]:
    """GPipe for whole rounds of micro-batches only."""
    for rank in range(shape.ranks):
        yield [Action(rank, kind, i) for kind in (Kind.F, Kind.B) for i in range(shape.micro_batches)]

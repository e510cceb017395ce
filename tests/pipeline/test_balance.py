"""The dynamic load balancer: layers leave a rank that has become slow, and the bits of training stay what they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline import LayerSpec, PipelineModule, initialize
from pipeline.batch import Item
from pipeline.links import local
from tests.pipeline.own_clock import taking
from tests.pipeline.running import everywhere

pytestmark = pytest.mark.usefixtures("own_time")

UNIT = 0.002  # seconds of a layer's forward, and of its backward
Slow = Callable[[int, int, int], float]
"""How many times as long a layer takes, by rank, layer and step."""


class Paced(nn.Module):
    """A linear layer that takes as long as it is told to."""

    def __init__(self, number: int, clock: list[int], slow: Slow) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.number, self.clock, self.slow = number, clock, slow

    def forward(self, x: Tensor) -> Tensor:
        threads = local.current()
        rank = 0 if threads is None else threads.link.rank
        return taking(self.linear(x), UNIT * self.slow(rank, self.number, self.clock[0]))


def _loss(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().mean()


def _items(step: int) -> list[Item]:
    generator = torch.Generator().manual_seed(step)
    return [Item(torch.randn(3, 4, generator=generator), torch.randn(3, 4, generator=generator)) for _ in range(4)]


Seen = tuple[list[float], list[tuple[int, ...]], list[str]]


def train(layers: int, steps: int, slow: Slow, settings: dict[str, Any]) -> Seen:
    """Losses and cuts of every step, and what the balancer said."""
    clock = [0]
    engine = initialize(
        PipelineModule([LayerSpec(Paced, n, clock, slow) for n in range(layers)], _loss),
        config={"partition": "uniform", "micro_batches": 4, "device": "cpu", "balance": "on", **settings},
        optimizer=partial(torch.optim.Adam, lr=0.01),
    )
    losses, cuts = [], []
    for step in range(steps):
        clock[0] = step
        losses.append(engine.train_batch(_items(step)).item())
        cuts.append(engine.plan.cuts)
    return losses, cuts, [] if engine.balancer is None else engine.balancer.notes


def second_is_slow(rank: int, layer: int, step: int) -> float:
    return 2.0 if rank == 1 and step >= 6 else 1.0


def test_layers_leave_a_rank_that_has_become_slow() -> None:
    losses, cuts, notes = everywhere(train, 2, 12, 18, second_is_slow, {})[0]
    assert cuts == [(0, 6, 12)] * 9 + [(0, 9, 12)] * 9  # 78 units a step by 1f1b; eight and four layers would take 80
    assert notes[0].startswith("balance: rank 1 is 2.00 times as slow as the others; rank 1 -> rank 0: layers 6-8; ")
    assert "a step should take 0.156 s instead of 0.216 s" in notes[0]
    assert notes[1].startswith("balance: after the move a step takes ")
    assert losses == everywhere(train, 2, 12, 18, lambda *_: 1.0, {"balance": "off"})[0][0]


def third_layer_is_slow(rank: int, layer: int, step: int) -> float:
    return 9.0 if layer == 2 and step >= 6 else 1.0


def test_one_layer_that_has_become_slow() -> None:
    _, cuts, notes = everywhere(train, 2, 12, 14, third_layer_is_slow, {})[0]
    assert cuts[-1] == (0, 3, 12)
    assert notes[0].startswith("balance: layer 2 changed what they take; ")


def first_half_is_slow(rank: int, layer: int, step: int) -> float:
    return 3.0 if layer < 6 and step >= 6 else 1.0


def test_layers_taken_for_a_slow_rank_are_found_out_when_they_move() -> None:
    """All layers of rank 0 become three times as slow: at first that looks as if the rank had."""
    _, cuts, _ = everywhere(train, 2, 12, 20, first_half_is_slow, {})[0]
    assert cuts[-1] == (0, 4, 12)


def test_report_moves_nothing() -> None:
    _, cuts, notes = everywhere(train, 2, 12, 13, second_is_slow, {"balance": "report"})[0]
    assert set(cuts) == {(0, 6, 12)}
    assert len(notes) == 1
    assert "nothing moves" in notes[0]


def second_is_slow_in_noise(rank: int, layer: int, step: int) -> float:
    return second_is_slow(rank, layer, step) * Random(f"{layer} {step}").uniform(0.85, 1.15)


def test_times_that_scatter_do_not_hide_that_it_is_the_rank() -> None:
    _, _, notes = everywhere(train, 2, 12, 30, second_is_slow_in_noise, {"balance": "report"})[0]
    (note,) = notes  # what is proposed again is not told again
    assert note.startswith("balance: rank 1 is 1.85 times as slow as the others; with rank 1 -> rank 0: layers 6-8, ")


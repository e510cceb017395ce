"""The dynamic load balancer: layers leave a rank that has become slow, and the bits of training stay what they are."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeline import LayerSpec, PipelineModule, initialize
from pipeline.batch import Item
from pipeline.links import local
from tests.pipeline.running import everywhere

UNIT = 0.002  # seconds of a layer's forward, and of its backward
Slow = Callable[[int, int, int], float]
"""How many times as long a layer takes, by rank, layer and step."""


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Sleeper(nn.Module):
    """A linear layer that takes as long as it is told to."""

    def __init__(self, number: int, clock: list[int], slow: Slow) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.number, self.clock, self.slow = number, clock, slow

    def forward(self, x: Tensor) -> Tensor:
        threads = local.current()
        rank = 0 if threads is None else threads.link.rank
        seconds = UNIT * self.slow(rank, self.number, self.clock[0])
        result: Tensor = _Sleep.apply(self.linear(x), seconds)
        return result


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
        PipelineModule([LayerSpec(Sleeper, n, clock, slow) for n in range(layers)], _loss),
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
    assert cuts[5] == (0, 6, 12)
    assert cuts[16][1] in (8, 9)
    assert cuts[-1] == cuts[16]
    assert "rank 1 is" in notes[0]
    assert "times as slow as the others" in notes[0]
    assert "rank 1 -> rank 0: layers 6-" in notes[0]
    assert "after the move a step takes" in notes[1]
    assert losses == everywhere(train, 2, 12, 18, lambda *_: 0.0, {"balance": "off"})[0][0]


def third_layer_is_slow(rank: int, layer: int, step: int) -> float:
    return 9.0 if layer == 2 and step >= 6 else 1.0


def test_one_layer_that_has_become_slow() -> None:
    _, cuts, _ = everywhere(train, 2, 12, 14, third_layer_is_slow, {})[0]
    assert 2 <= cuts[-1][1] <= 4


def first_half_is_slow(rank: int, layer: int, step: int) -> float:
    return 3.0 if layer < 6 and step >= 6 else 1.0


def test_layers_taken_for_a_slow_rank_are_found_out_when_they_move() -> None:
    """All layers of rank 0 become three times as slow: at first that looks as if the rank had."""
    _, cuts, _ = everywhere(train, 2, 12, 20, first_half_is_slow, {})[0]
    assert cuts[-1][1] in (3, 4)


def test_report_moves_nothing() -> None:
    _, cuts, notes = everywhere(train, 2, 12, 13, second_is_slow, {"balance": "report"})[0]
    assert set(cuts) == {(0, 6, 12)}
    assert len(notes) == 1
    assert "nothing moves" in notes[0]

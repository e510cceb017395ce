"""Layers that take a + b·rows seconds: which size of micro-batch does a run come to, and which is the best?

What benchmarks.rebalance runs on 4 ranks as `sizes`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.ranks import finish, median
from benchmarks.sleeping_layers import sleep_until, wake_exactly
from partition import Profile
from partition.sizes import numbers_of
from pipeline import LayerSpec, PipelineModule, initialize
from pipeline.engine import Engine

ROWS, WIDTH, LAYERS = 64, 64, 8
PACES = ((0.0002, 0.0002), (0.004, 0.00005))
"""Seconds a and b of each of F, I and W: at first rows cost, then calls do."""
STEPS = 10
SETTINGS = {"global_batch": ROWS, "balance_window": 3, "balance_gain": 0.03}
CAP_NUMBER = 4
"""Micro-batches of a step, fewer of which are to be beyond the memory cap."""


adamw = partial(torch.optim.AdamW, lr=0.01, eps=1e-4)


class Clock:
    """What layers take at the moment."""

    pace = PACES[0]


class _Paced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        sleep_until(time.perf_counter() + 2 * ctx.seconds)
        return gradients[0], None


class Paced(nn.Module):
    """A linear layer whose forward takes a + b·rows seconds, and its backward twice as long."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        a, b = Clock.pace
        seconds = a + b * len(x)
        end = time.perf_counter() + seconds
        y: Tensor = _Paced.apply(self.linear(x), seconds)
        sleep_until(end)
        return y


def engine_of(profile: Profile | None = None, **settings: Any) -> Engine:
    module = PipelineModule([LayerSpec(Paced) for _ in range(LAYERS)], functional.mse_loss)
    config = {"partition": "uniform", "micro_batches": 8, **SETTINGS, **settings}
    return initialize(module, config=config, optimizer=adamw, profile=profile)


def items() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return itertools.cycle([tuple(torch.randn(2, 16, WIDTH, generator=generator)) for _ in range(12)])


def run(engine: Engine) -> tuple[list[float], list[int]]:
    """Losses, and numbers of micro-batches, of ``STEPS`` steps at each pace."""
    data, losses, numbers = items(), [], []
    for Clock.pace in PACES:
        for _ in range(STEPS):
            losses.append(engine.train_batch(data).item())
            numbers.append(engine.config.micro_batches)
    return losses, numbers


def sizes() -> None:
    """On each of 4 ranks."""
    wake_exactly()
    torch.set_default_dtype(torch.float64)
    found: dict[str, Any] = {"notes": []}
    watched = engine_of(balance_micro_batch="auto")
    losses, numbers = run(watched)
    found["notes"] += [*watched.notes, f"micro-batches of each step: {numbers}"]
    fixed, _ = run(engine_of())
    largest = max(abs(ours / theirs - 1) for ours, theirs in zip(losses, fixed, strict=True))
    swept = sweep(watched)
    for pace, number, took in zip(PACES, (numbers[STEPS - 1], numbers[-1]), swept, strict=True):
        best = min(took, key=took.__getitem__)
        found["notes"].append(f"a, b = {pace}: {number} micro-batches; the best are {best}, of {took}")
        name = f"step with the size after {STEPS} steps over the best of all, a = {pace[0]}, b = {pace[1]}"
        found[name] = took[number], took[best], 1.05
    found["losses' largest difference from those of a fixed size, in 1e-12"] = largest / 1e-12 + 1e-9, 1, 1.0
    profile, limit = cap()
    kept = engine_of(balance_micro_batch="auto", profile=profile, memory_limit=limit, micro_batches=16)
    _, numbers = run(kept)
    found["notes"] += [*kept.notes, f"with a memory cap: {numbers}"]
    found["rows of the largest micro-batch over those that the memory cap allows"] = (
        ROWS / min(numbers), ROWS / CAP_NUMBER, 1.0,
    )  # fmt: skip
    finish(found)


def sweep(engine: Engine) -> list[dict[int, float]]:
    """Seconds of a step of every number of micro-batches, at each pace; medians over rounds in turn."""
    every = []
    data = items()
    for Clock.pace in PACES:
        found: dict[int, list[float]] = {number: [] for number in numbers_of(ROWS)}
        for _ in range(3):
            for number, seconds in found.items():
                engine.relayout(balance_micro_batch="off", micro_batches=number)
                engine.train_batch(data)
                for _ in range(2):
                    engine.train_batch(data)
                    seconds.append(engine.stats.seconds if engine.stats else 0.0)
        every.append({number: round(median(seconds), 5) for number, seconds in found.items()})
    return every


def cap() -> tuple[Profile, float]:
    """What layers keep, and bytes with which the fullest rank can have micro-batches of the size of ``CAP_NUMBER``, and
    none twice as large."""
    Clock.pace = PACES[0]
    timed = engine_of(partition="profile", micro_batches=CAP_NUMBER)
    timed.train_batch(items())
    predicted = engine_of(timed.profile, micro_batches=CAP_NUMBER).memory_report().predicted
    assert timed.profile is not None
    assert predicted is not None
    return timed.profile, 1.1 * max(rank.total for rank in predicted)

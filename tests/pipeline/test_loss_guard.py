"""Losses that are no number, or far above the others, skip a step or send training back to a checkpoint, as set."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline import LayerSpec, PipelineModule, initialize
from pipeline.batch import Item
from pipeline.engine import Engine
from pipeline.errors import ConfigError, LossSpike, NonFiniteLoss, TrainingWarning
from pipeline.guard import LossGuard
from tests.pipeline.running import everywhere


def loss(y: Tensor, target: tuple[Tensor, float]) -> Tensor:
    return functional.mse_loss(y, target[0]) * target[1]


def start(**settings: Any) -> Engine:
    layers = [LayerSpec(nn.Linear, 8, 8), LayerSpec(nn.Dropout, 0.2), LayerSpec(nn.Linear, 8, 8)]
    config = {"partition": "uniform", "micro_batches": 2, "device": "cpu", **settings}
    module = PipelineModule(layers, loss)
    return initialize(module, config=config, optimizer=partial(torch.optim.Adam, lr=0.001))


def items(number: int, factor: float = 1.0) -> list[Item]:
    """One of the micro-batches of a step has its loss multiplied."""
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(2, 2, 16, 8, generator=generator)
    return [(x[0], (y[0], 1.0)), (x[1], (y[1], factor))]


def weights(engine: Engine) -> list[Tensor]:
    return list(engine.full_state_dict().values())


# -- what is done --------------------------------------------------------------------------------------------

BAD = {"nonfinite_loss": float("nan"), "loss_spike": 1000.0}
BEFORE = 30


def skips(setting: str) -> bool:
    factors = {BEFORE: BAD[setting], BEFORE + 1: BAD[setting]}
    engine, other = start(**{setting: "skip"}), start()
    for number in range(BEFORE + 4):
        if number in factors:
            with pytest.warns(TrainingWarning, match=f"the loss of step {BEFORE} is .*: the step is skipped") as told:
                engine.train_batch(items(number, factors[number]))
            assert len(told) == 1
            assert engine.stats is not None
            assert engine.stats.skipped
        else:
            assert engine.train_batch(items(number)).equal(other.train_batch(items(number)))
    assert (engine.steps, engine.items) == (other.steps, other.items + 4) == (BEFORE + 2, 2 * (BEFORE + 4))
    return all(a.equal(b) for a, b in zip(weights(engine), weights(other), strict=True))


@pytest.mark.parametrize("setting", BAD)
def test_a_skipped_step_changes_nothing(setting: str) -> None:
    assert everywhere(skips, 1, setting) == [True]


def rolls_back(setting: str, path: str) -> bool:
    engine = start(**{setting: "rollback"}, save_to=path, save_every="10 steps")
    for number in range(35):
        engine.train_batch(items(number))
    engine.train_batch(items(35, BAD[setting]))
    assert (engine.steps, engine.items) == (30, 72)
    after = [engine.train_batch(items(number)) for number in range(36, 40)]
    engine.finish_saving()
    other = start()
    other.load_checkpoint(Path(path) / "step-00000030")
    assert after == [other.train_batch(items(number)) for number in range(36, 40)]
    return all(a.equal(b) for a, b in zip(weights(engine), weights(other), strict=True))


@pytest.mark.parametrize("processes", [False, True])
@pytest.mark.parametrize("setting", BAD)
@pytest.mark.filterwarnings("ignore:the loss of step")
def test_rolling_back_is_to_go_on_from_the_checkpoint_with_the_next_data(
    setting: str, processes: bool, tmp_path: Path
) -> None:
    assert everywhere(rolls_back, 2, setting, str(tmp_path), processes=processes) == [True, True]


def test_what_was_done_is_told(tmp_path: Path) -> None:
    engine = start(nonfinite_loss="rollback", save_to=tmp_path)
    engine.train_batch(items(0))
    engine.save_checkpoint()
    text = r"the loss of step 1 is nan .* micro-batch 1: going back to .*step-00000001, and on with the next data"
    with pytest.warns(TrainingWarning, match=text):
        engine.train_batch(items(1, float("nan")))


def test_a_spike_may_be_an_error() -> None:
    engine = start(loss_spike="raise")
    for number in range(BEFORE):
        engine.train_batch(items(number))
    before = weights(engine)
    with pytest.raises(LossSpike, match=r"step 30 is .* times as far above the median .*nothing was updated"):
        engine.train_batch(items(BEFORE, 1000.0))
    assert all(a.equal(b) for a, b in zip(weights(engine), before, strict=True))


@pytest.mark.filterwarnings("ignore:the loss of step")
@pytest.mark.parametrize("remedy", ["skip", "rollback"])
def test_it_is_not_tried_for_ever(remedy: str, tmp_path: Path) -> None:
    engine = start(nonfinite_loss=remedy, loss_attempts=3, save_to=tmp_path, save_every="2 steps")
    taken = 0
    for number in range(4):  # one after the other, with steps that are well between them and no step beyond
        for step in range(engine.steps, 3):
            engine.train_batch(items(taken + step))
        taken += 3
        if number < 3:
            engine.train_batch(items(9, float("nan")))
            assert engine.steps == (3 if remedy == "skip" else 2)
    with pytest.raises(NonFiniteLoss, match=r"No later step was reached in as many attempts as loss_attempts allows"):
        engine.train_batch(items(9, float("nan")))
    engine.train_batch(items(10))
    engine.train_batch(items(11))
    engine.train_batch(items(9, float("nan")))  # a later step: it counts anew


def test_what_is_usual_goes_through_a_checkpoint(tmp_path: Path) -> None:
    engine, other = start(loss_spike="raise"), start(loss_spike="raise")
    for number in range(BEFORE):
        engine.train_batch(items(number))
    engine.save_checkpoint(tmp_path)
    other.load_checkpoint(tmp_path)
    with pytest.raises(LossSpike):
        other.train_batch(items(BEFORE, 1000.0))


@pytest.mark.parametrize("setting", BAD)
def test_going_back_without_checkpoints(setting: str) -> None:
    with pytest.raises(ConfigError, match=f'{setting} = "rollback" goes back to a checkpoint: set save_to'):
        start(**{setting: "rollback"})


# -- what a spike is -----------------------------------------------------------------------------------------


def test_a_spike_is_far_above_what_is_usual() -> None:
    guard = LossGuard()
    for step in range(24):
        guard.applied(step, 2.0 + 0.01 * (step % 2))
    assert not guard.spike(9.0, 20.0), "too few to tell"
    for step in range(24, 60):
        guard.applied(step, 2.0 + 0.01 * (step % 2))
    assert len(guard.losses) == 50
    assert not guard.spike(2.1, 20.0)
    assert not guard.spike(0.0, 20.0)
    assert guard.spike(2.2, 20.0)
    assert not guard.spike(2.2, 100.0)


def test_losses_that_are_all_alike_leave_room() -> None:
    guard = LossGuard()
    for step in range(50):
        guard.applied(step, 5.0)
    assert not guard.spike(5.09, 20.0)
    assert guard.spike(5.11, 20.0)

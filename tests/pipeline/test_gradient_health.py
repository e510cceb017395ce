"""The layer whose gradients vanish or explode most is named once, and healthy training says nothing."""

from __future__ import annotations

import re
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipeline import LayerSpec, PipelineModule, initialize, run_local
from pipeline.errors import TrainingWarning
from pipeline.gradients.health import GradientHealth
from tests.pipeline.layouts import Layout
from tests.pipeline.models import Recipe, adamw
from tests.pipeline.running import everywhere, train_here, transformer_case

DEPTH, WIDTH = 30, 64


def layer(gain: float) -> nn.Module:
    linear = nn.Linear(WIDTH, WIDTH)
    nn.init.normal_(linear.weight, std=gain / WIDTH**0.5)
    return nn.Sequential(linear, nn.Tanh())


def _messages(gain: float, steps: int) -> list[str]:
    module = PipelineModule([LayerSpec(layer, gain) for _ in range(DEPTH)], functional.mse_loss)
    config = {"partition": "uniform", "micro_batches": 2, "device": "cpu"}
    engine = initialize(module, config=config, optimizer=partial(torch.optim.SGD, lr=1e-4))
    generator = torch.Generator().manual_seed(0)
    items = [(torch.randn(4, WIDTH, generator=generator), torch.randn(4, WIDTH, generator=generator)) for _ in range(2)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            engine.train_batch(iter(items))
    return [str(warning.message) for warning in caught if issubclass(warning.category, TrainingWarning)]


@pytest.mark.parametrize(
    ("gain", "what"),
    [(0.1, r"gradients of layer \d+ \(layer\) vanish: .* more layers likewise; it hardly learns"),
     (3.0, r"gradients of layer \d+ \(layer\) explode: .*; set gradient_clipping")],
)  # fmt: skip
def test_a_deep_network_of_a_wrong_gain_is_diagnosed_by_layer(gain: float, what: str) -> None:
    (message,) = run_local(_messages, 1, gain, 20)[0]
    assert re.search(what, message)


def _healthy(*args: Any) -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train_here(*args)
    return sum(issubclass(warning.category, TrainingWarning) for warning in caught)


def test_healthy_training_says_nothing() -> None:
    case = transformer_case(Recipe(), 4, steps=30, optimizer=adamw)
    assert everywhere(_healthy, 2, case, Layout("1f1b", 2)) == [0, 0]


def test_it_is_told_once_and_one_odd_step_says_nothing() -> None:
    health = GradientHealth(["0 (a)", "1 (b)", "2 (c)"])
    healthy, odd, sick = [1.0, 4.0, 1.0], [1e-20, 1.0, 1.0], [1e-20, 1.0, 1.0]
    assert not any(health.observe(healthy) for _ in range(20))
    assert health.observe(odd) == ""
    assert not any(health.observe(healthy) for _ in range(20))
    said = [text for text in (health.observe(sick) for _ in range(30)) if text]
    assert len(said) == 1
    assert said[0].startswith("the gradients of layer 0 (a) vanish: their norm is 1.0e-10 of that of layer 2 (c)")
    assert not health.observe([float("nan"), 1.0, 1.0])

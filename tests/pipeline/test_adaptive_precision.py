"""Layers change their types while training runs, as a written trace says, on all ranks alike."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from partition import LayerCost, Profile
from pipeline import LayerSpec, PipelineConfig, PipelineModule, TiedLayerSpec, initialize, run_local
from pipeline.errors import TrainingWarning
from pipeline.precision import faster
from pipeline.precision.adaptive import AdaptivePrecision
from pipeline.precision.types import types_of
from tests.pipeline.running import everywhere

WIDTH = 4

# -- by the numbers of steps alone ---------------------------------------------------------------------------


def tied() -> PipelineModule:
    shared = TiedLayerSpec("w", nn.Linear, WIDTH, WIDTH)
    return PipelineModule([shared, LayerSpec(nn.Linear, WIDTH, WIDTH), torch.tanh, shared], functional.mse_loss)


def trace(overflows: dict[int, int], steps: int, **settings: Any) -> str:
    """For each step what layers 0 to 3 compute in when it has ended: h for fp16, f for fp32; at first hhfh."""
    config = PipelineConfig(precision={"*": "fp16", "2": "fp32"}, **settings)
    module = tied()
    adaptive = AdaptivePrecision(config, module, types_of(config.precision, module))
    found = []
    for step in range(steps):
        adaptive.observe(overflows.get(step))
        types = types_of(adaptive.precision, module)
        found.append("".join("h" if dtype is torch.float16 else "f" for dtype in types))
    return " ".join(found)


def test_the_written_trace() -> None:
    """More than one overflow in four steps raises a layer for three."""
    settings = {"precision_overflows": 1, "precision_window": 4, "precision_rest": 3}
    assert trace({1: 1, 4: 1}, 9, **settings) == "hhfh hhfh hhfh hhfh hffh hffh hffh hhfh hhfh"
    assert trace({1: 1, 5: 1}, 7, **settings) == " ".join(["hhfh"] * 7)  # too far apart
    assert trace({0: 1, 1: 3, 2: 1}, 6, **settings) == "hhfh hhfh hffh hffh hffh hhfh"  # each counts for itself
    assert trace({0: 3, 1: 3}, 6, **settings) == "hhfh fhff fhff fhff hhfh hhfh"  # tied layers go together
    assert trace({0: 2, 1: 2, 2: 2}, 4, **settings) == " ".join(["hhfh"] * 4)  # it is in fp32 anyway
    assert trace({0: 1, 1: 1, 5: 1, 6: 1}, 8, **settings) == "hhfh hffh hffh hffh hhfh hhfh hffh hffh"  # once more
    assert trace({0: 1}, 3, **{**settings, "precision_overflows": 0}) == "hffh hffh hffh"
    assert trace({0: 1, 1: 1}, 3) == " ".join(["hhfh"] * 3)  # not asked for


def test_each_layer_is_announced_once() -> None:
    config = PipelineConfig(precision="fp16", precision_overflows=0, precision_rest=2)
    module = tied()
    adaptive = AdaptivePrecision(config, module, types_of(config.precision, module))
    for layer in (1, None, None, 1, 3):
        adaptive.observe(layer)
    assert [note.split(" overflowed")[0] for note in adaptive.notes] == [
        "precision: layer 1 (Linear)",
        "precision: layer 3 (Linear)",
    ]


def test_its_state_goes_into_another() -> None:
    config = PipelineConfig(precision="fp16", precision_overflows=1, precision_window=4, precision_rest=3)
    module = tied()
    make = partial(AdaptivePrecision, config, module, types_of(config.precision, module))
    script = [1, None, 1, None, 3, 3, None, None, None, 1, 1]
    through = make()
    expected = [(through.observe(layer), through.precision) for layer in script]
    for stop in range(len(script)):
        first, second = make(), make()
        found = [(first.observe(layer), first.precision) for layer in script[:stop]]
        second.load_state_dict(first.state_dict())
        found += [(second.observe(layer), second.precision) for layer in script[stop:]]
        assert found == expected


# -- in training ---------------------------------------------------------------------------------------------


class _Huge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor / ctx.factor, None


class Steep(nn.Module):
    """A linear layer whose gradients are beyond fp16 at the steps of a script."""

    def __init__(self, number: int, script: dict[int, int], clock: list[int]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.number, self.script, self.clock = number, script, clock

    def forward(self, x: Tensor) -> Tensor:
        steep = self.script.get(self.clock[0]) == self.number
        result: Tensor = _Huge.apply(self.linear(x), 1e9 if steep else 1.0)
        return result


SCRIPT = {1: 2, 2: 2, 4: 1, 7: 1, 8: 0, 12: 1, 13: 1}
EXPECTED = "hhhh hhhh hhfh hhfh hhfh hhfh hhfh hhhh hhhh hhhh hhhh hhhh hhhh hfhh hfhh"
"""Two in three steps raise for five: layer 2 after step 2, and after step 7 no more; layer 1 not for 4 and 7."""


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    while True:
        x, y = torch.randn(2, 3, WIDTH, generator=generator)
        yield x, y


def types_in_training(steps: int, **settings: Any) -> tuple[str, list[float], int]:
    clock = [0]
    module = PipelineModule([LayerSpec(Steep, n, SCRIPT, clock) for n in range(4)], functional.mse_loss)
    config = {
        "precision": "fp16", "precision_overflows": 1, "precision_window": 3, "precision_rest": 5,
        "loss_scale_initial": 1024.0, "micro_batches": 2, "partition": "uniform", **settings,
    }  # fmt: skip
    engine = initialize(module, config=config, optimizer=partial(torch.optim.SGD, lr=0.01))
    data, found, losses = batches(), [], []
    for step in range(steps):
        clock[0] = step
        losses.append(engine.train_batch(data).item())
        types = types_of(engine.config.precision, module)
        held = {held.layer: layer.module for held, layer in engine._planned().built.layers.items()}
        for layer, built in held.items():  # what this rank holds is in the type that it says
            assert built is not None
            if engine._planned().zero < 3 and next(built.parameters()).dtype is not types[layer]:
                raise AssertionError(f"layer {layer} has {next(built.parameters()).dtype}, not {types[layer]}")
        found.append("".join("h" if dtype is torch.float16 else "f" for dtype in types))
    return " ".join(found), losses, engine.loss_scale.skipped if engine.loss_scale else 0


@pytest.mark.filterwarnings("ignore:precision")
@pytest.mark.parametrize(
    ("ranks", "settings", "processes"),
    [
        (1, {}, False),
        (2, {}, False),
        (4, {"data_parallel": 2, "zero": 2}, False),
        (4, {"schedule": "zb-v", "stages_per_rank": 2, "data_parallel": 2, "zero": 3}, False),
        (2, {}, True),
    ],
    ids=str,
)
def test_a_script_of_overflows_gives_the_written_trace_on_all_ranks(
    ranks: int, settings: dict[str, Any], processes: bool
) -> None:
    for found, losses, skipped in everywhere(types_in_training, ranks, 15, processes=processes, **settings):
        assert found == EXPECTED
        assert skipped == len(SCRIPT)
        assert all(loss == loss for loss in losses)


def test_it_is_warned_of() -> None:
    with pytest.warns(TrainingWarning, match=r"layer 2 \(Steep\) overflowed 2 times in 3 steps, and computes in fp32"):
        types_in_training(4)


# -- down to bf16 --------------------------------------------------------------------------------------------


def lowered() -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    module = PipelineModule([LayerSpec(nn.Linear, WIDTH, WIDTH), torch.tanh, LayerSpec(nn.Linear, WIDTH, WIDTH)],
                            functional.mse_loss)  # fmt: skip
    config = {"precision_lower": True, "precision_window": 3, "micro_batches": 2, "profile_runs": 1}
    engine = initialize(module, config=config, optimizer=partial(torch.optim.SGD, lr=0.01))
    data = batches()
    for _ in range(5):
        engine.train_batch(data)
    return engine.config.precision, engine.notes


@pytest.mark.filterwarnings("ignore:precision")
def test_layers_that_are_faster_in_bf16_are_lowered_after_a_quiet_window(monkeypatch: pytest.MonkeyPatch) -> None:
    def on(item: Any, config: PipelineConfig, *others: Any) -> Profile:
        cost = LayerCost(name="l", type="L", forward=0.0, input_grad=0.0, weight_grad=0.0, parameters=20)
        return Profile(layers=(cost, cost, cost.model_copy(update={"forward": 1e9})))

    monkeypatch.setattr(faster, "profile_on", on)
    for precision, notes in run_local(lowered, 2):
        assert precision == (("*", "fp32"), ("0", "bf16"))  # 1 has no parameters to be cast, 2 would be slower
        assert notes == ("precision: layer 0 (Linear) in bf16 from now on, which was measured to be faster",)


def test_where_bf16_is_no_faster_all_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def on(item: Any, config: PipelineConfig, *others: Any) -> Profile:
        cost = LayerCost(name="l", type="L", forward=1e9, input_grad=0.0, weight_grad=0.0, parameters=20)
        return Profile(layers=(cost,) * 3)

    monkeypatch.setattr(faster, "profile_on", on)
    assert run_local(lowered, 2) == [((), ())] * 2

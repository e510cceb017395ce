"""A layer that changes its input in place gets a copy, so that nothing else that needs the input is changed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline import LayerSpec, PipelineModule, initialize, run_local
from pipeline.batch import Item
from pipeline.errors import StepFailed
from tests.pipeline.reference import Case, Layout, agree, plainly, run

pytestmark = pytest.mark.usefixtures("double_precision")

WIDTH = 4


def items(step: int, data_rank: int, count: int = 3) -> list[Item]:
    generator = torch.Generator().manual_seed(10 * step + data_rank)
    return [Item(*torch.randn(2, 2, WIDTH, generator=generator)) for _ in range(count)]


class Squashed(nn.Linear):
    """Its backward needs what it has handed on."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(super().forward(x))


class Shifted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 1.0)


class ShiftedInPlace(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.add_(1.0))


def case(shifted: type[nn.Module]) -> Case:
    kinds = [Squashed, shifted, Squashed, shifted]
    layers = [LayerSpec(kind, WIDTH, WIDTH) for kind in kinds]
    return Case(lambda: PipelineModule(layers, functional.mse_loss), items)


@pytest.mark.parametrize(
    "layout",
    [Layout("1f1b", 1), Layout("1f1b", 2), Layout("1f1b", 4), Layout("split", 2), Layout("1f1b", 2, recompute="every")],
    ids=str,
)
def test_what_the_layer_before_has_saved_is_not_changed(layout: Layout) -> None:
    """Where both are on one rank they share the memory, on two ranks they do not: the result is the same."""
    found = run(case(ShiftedInPlace), layout)
    agree(found, plainly(case(Shifted), layout, found.before), str(layout))


class Late(nn.Linear):
    """Adds 1 once it is told to; in place, if it is made so."""

    def __init__(self, in_place: bool, begun: list[bool]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.in_place, self.begun = in_place, begun

    def forward(self, x: Tensor) -> Tensor:
        if self.begun:
            x = x.add_(1.0) if self.in_place else x + 1.0
        return super().forward(x)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("recompute", ["none", "every"])
def test_a_layer_that_begins_to_change_its_input_is_told(place: int, recompute: str) -> None:
    """The step fails as a whole; when it is run again the layer gets copies."""

    def train(in_place: bool) -> tuple[list[str], list[float]]:
        begun: list[bool] = []
        layers = [LayerSpec(Squashed, WIDTH, WIDTH)] * 2
        layers[place] = LayerSpec(Late, in_place, begun)
        config = {"micro_batches": 3, "recompute": recompute, "partition": "uniform"}
        engine = initialize(PipelineModule(layers, functional.mse_loss), config=config, optimizer=torch.optim.SGD)
        losses = [engine.train_batch(items(0, 0)).item()]
        begun.append(True)
        errors = []
        for _ in range(2):
            try:
                losses.append(engine.train_batch(items(1, 0)).item())
            except StepFailed as error:
                errors.append(str(error))
        return errors, losses

    (errors, losses), (none, expected) = (run_local(train, 1, in_place)[0] for in_place in (True, False))
    assert none == []
    assert losses == expected[: len(losses)]
    assert len(losses) == 2
    assert len(errors) == 1
    assert f"layer {place} (Late) changed its input in place, but did not when it ran first" in errors[0]
    assert "It gets one from now on: run the step again" in errors[0]

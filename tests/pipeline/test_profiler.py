"""What the profiler makes of the times that ranks measured."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from pipeline import LayerSpec, PipelineModule, initialize
from pipeline.profiler import _speeds


@pytest.mark.parametrize(
    ("seconds", "pipe", "speeds"),
    [
        ([1.0, 1.05, 0.95, 1.0], 4, ()),  # within what times scatter
        ([1.0, 1.0, 1.5, 1.0], 4, (1.0, 1.0, 1 / 1.5, 1.0)),
        ([0.5, 1.0, 1.0], 3, (2.0, 1.0, 1.0)),
        ([2.0], 1, ()),
        ([1.0, 1.0, 1.0, 2.0], 2, (1.0, 0.5)),  # ranks 1 and 3 hold copies of one stage: the slower counts
    ],
)
def test_ranks_that_take_longer_for_the_same_layers_are_slower(
    seconds: list[float], pipe: int, speeds: tuple[float, ...]
) -> None:
    assert _speeds(seconds, pipe) == pytest.approx(speeds)


def test_a_layer_that_raises_while_it_is_timed_is_named() -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(7, -1)

    engine = initialize(PipelineModule([nn.Linear(4, 4), LayerSpec(Wrong)], mse_loss), optimizer=torch.optim.SGD)
    with pytest.raises(RuntimeError) as caught:
        engine.train_batch([(torch.ones(2, 4), torch.ones(2, 4))])
    assert caught.value.__notes__ == ["raised in layer 1 (Wrong), as layers were timed for the cuts"]

"""Layers that torch.compile compiles, each by itself: they train as they would without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline import LayerSpec, PipelineModule, TiedLayerSpec, initialize, run_local
from pipeline.batch import Item
from pipeline.errors import ConfigError

pytestmark = pytest.mark.usefixtures("double_precision")

WIDTH = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(functional.gelu(self.linear(self.norm(x))))


def train(**settings: Any) -> tuple[list[float], dict[str, Tensor], str]:
    generator = torch.Generator().manual_seed(0)
    items = [Item(*torch.randn(2, 3, WIDTH, generator=generator)) for _ in range(4)]
    tied = TiedLayerSpec("table", nn.Linear, WIDTH, WIDTH)
    module = PipelineModule([tied, LayerSpec(Block), LayerSpec(Block), tied], functional.mse_loss)
    config = {"micro_batches": 4, "partition": "uniform", **settings}
    engine = initialize(module, config=config, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    losses = [engine.train_batch(items).item() for _ in range(2)] + [engine.eval_batch(items).item()]
    return losses, engine.full_state_dict(), str(engine.split_report())


@pytest.mark.parametrize("settings", [{}, {"recompute": "every"}, {"schedule": "zb-h1"}], ids=str)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_compiled_layer_trains_as_it_would_without(ranks: int, settings: dict[str, Any]) -> None:
    losses, found, report = run_local(lambda: train(**settings, compile="aot_eager"), ranks)[0]
    expected_losses, expected, plain_report = run_local(lambda: train(**settings), ranks)[0]
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert float((found[name] - tensor).abs().max()) <= 1e-12 * float(tensor.abs().max()), name
    assert plain_report == ""
    assert "layer 1 (Block): linear.weight gets its gradient in I" in report


def test_layers_are_timed_as_they_will_run() -> None:
    def worker() -> tuple[float, ...]:
        module = PipelineModule([LayerSpec(nn.Linear, 256, 256)] * 2, functional.mse_loss)
        engine = initialize(module, config={"compile": "aot_eager", "micro_batches": 1}, optimizer=torch.optim.SGD)
        engine.train_batch([Item(torch.randn(64, 256), torch.randn(64, 256))])
        assert engine.profile is not None
        return tuple(layer.weight_grad_bytes for layer in engine.profile.layers)

    assert run_local(worker, 1)[0] == (0, 0)  # nothing waits for W


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'indctor' is no backend of torch\.compile; did you mean 'inductor'"):
        train(compile="indctor")

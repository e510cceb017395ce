"""A model of blocks on random rows, for tests of steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline import LayerSpec, PipelineModule, initialize
from pipeline.batch import Item
from pipeline.engine import Engine
from tests.pipeline.models import sgd
from tests.pipeline.reference import Layout

WIDTH = 4
SIZES = (2, 3, 2, 1)


def items(step: int, data_rank: int, sizes: Sequence[int] = SIZES) -> list[Item]:
    """Micro-batches of random rows, with random targets."""
    generator = torch.Generator().manual_seed(10 * step + data_rank)
    return [Item(torch.randn(n, WIDTH, generator=generator), torch.randn(n, WIDTH, generator=generator)) for n in sizes]


class Block(nn.Module):
    """A residual layer with dropout, if any."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.linear(self.norm(x)).tanh())


def blocks(*layers: Any, loss_fn: Any = functional.mse_loss, dropout: float = 0.0) -> PipelineModule:
    """These layers, with a linear one before and enough blocks behind to make six."""
    specs = [layer if isinstance(layer, LayerSpec) else LayerSpec(layer) for layer in layers]
    filling = [LayerSpec(Block, dropout)] * (5 - len(specs))
    return PipelineModule([LayerSpec(nn.Linear, WIDTH, WIDTH), *specs, *filling], loss_fn)


def start(model: Callable[[], PipelineModule], layout: Layout, **settings: Any) -> Engine:
    return initialize(model(), config=layout.settings(**settings), optimizer=sgd)

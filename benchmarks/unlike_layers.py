"""Twelve layers for which parameters say nothing about time."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline import LayerSpec, PipelineModule


class Attention(nn.Module):
    """Few parameters, and time that grows with the square of the sequence."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Convolution(nn.Module):
    """A wide kernel over the sequence."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(width, width, kernel, padding=kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.gelu(self.convolution(x.transpose(1, 2)).transpose(1, 2))


class Summary(nn.Module):
    """Many parameters on one row of a sample: a gate that is computed from the mean of the sequence."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.down(functional.gelu(self.up(x.mean(dim=1, keepdim=True)))))
        return x * gate


def build(vocabulary: int, width: int) -> PipelineModule:
    """An embedding, then layers of three kinds, then a norm and a projection."""
    layers = [
        LayerSpec(nn.Embedding, vocabulary, width),
        LayerSpec(Summary, width, 2048),
        LayerSpec(Convolution, width, 15),
        LayerSpec(Attention, width),
        LayerSpec(Attention, width),
        LayerSpec(Convolution, width, 7),
        LayerSpec(Attention, width, 8),
        LayerSpec(Summary, width, 4096),
        LayerSpec(Convolution, width, 9),
        LayerSpec(Attention, width),
        LayerSpec(nn.LayerNorm, width),
        LayerSpec(nn.Linear, width, width),
    ]
    return PipelineModule(layers, loss_fn=functional.mse_loss)

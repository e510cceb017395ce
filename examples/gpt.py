"""A byte-level GPT as a list of layers: the model of train_gpt.py.

    pipeloom partition examples/gpt.py:GPT --ranks 4       # what each layer costs, and where to cut
    pipeloom train examples/gpt.py:GPT --steps 20
"""

from __future__ import annotations

from collections.abc import Iterator

import corpus
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline import LayerSpec, PipelineModule, TiedLayerSpec


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = zero(nn.Linear(dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        (q, k), v = rotated(qkv[:2]), qkv[2]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = zero(nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def zero(linear: nn.Linear) -> nn.Linear:
    """Start a residual branch as nothing, which lets a small model learn at a high rate."""
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


def rotated(x: Tensor) -> Tensor:
    """Turn pairs of channels by angles that grow with the position (rotary embedding, arXiv 2104.09864)."""
    a, b = x.chunk(2, dim=-1)
    frequency = 1e-4 ** torch.linspace(0, 1, a.shape[-1], device=x.device)
    angle = torch.outer(torch.arange(x.shape[-2], device=x.device), frequency)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


def embedding(dim: int) -> nn.Embedding:
    table = nn.Embedding(256, dim)
    nn.init.normal_(table.weight, std=0.05)
    return table


def unembed(table: nn.Embedding, x: Tensor) -> Tensor:
    return F.linear(x, table.weight)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class GPT(PipelineModule):
    """Attention and MLP are layers of their own, so that a cut may fall between them."""

    def __init__(self, layers: int = 4, dim: int = 128, heads: int = 4) -> None:
        block = [LayerSpec(Attention, dim, heads), LayerSpec(MLP, dim)]
        super().__init__(
            [
                TiedLayerSpec("bytes", embedding, dim),
                *block * layers,
                LayerSpec(nn.LayerNorm, dim),
                TiedLayerSpec("bytes", embedding, dim, forward=unembed),
            ],
            loss_fn=cross_entropy,
        )


def batches() -> Iterator[corpus.Item]:
    """Micro-batches without end, where the command line runs this model."""
    return corpus.random_windows(corpus.load(None).train, length=128, rows=2, seed=0)

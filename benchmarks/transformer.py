"""The layers of a GPT, attention and MLP apart, so that a cut may fall between them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    """Causal self-attention; x: (rows, sequence, dim)."""

    def __init__(self, dim: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Positions(nn.Module):
    """Token and position embedding; tokens: (rows, sequence)."""

    def __init__(self, vocabulary: int, dim: int, sequence: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.positions = nn.Parameter(torch.randn(sequence, dim) * 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions


def blocks(count: int, dim: int) -> list[Callable[[], nn.Module]]:
    """Makers of two layers a block."""
    return [partial(Attention, dim), partial(MLP, dim)] * count


def gpt(count: int, dim: int, sequence: int, vocabulary: int) -> list[Callable[[], nn.Module]]:
    """Makers of all layers of a language model."""
    return [
        partial(Positions, vocabulary, dim, sequence),
        *blocks(count, dim),
        partial(nn.LayerNorm, dim),
        partial(nn.Linear, dim, vocabulary, bias=False),
    ]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over all tokens of a micro-batch."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

"""A small transformer as a layer list, its data, and optimizers to train it with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline import LayerSpec, PipelineModule, TiedLayerSpec
from pipeline.batch import Item

VOCABULARY, WIDTH, HEADS, LENGTH = 13, 8, 2, 5
LAYERS = 12

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


class Recipe(NamedTuple):
    """Which variant of the transformer; small enough to be sent to another process."""

    tied: bool = True
    dtype: torch.dtype = torch.float32
    dropout: float = 0.1
    norm: str = "layer"
    frozen: tuple[int, ...] = ()


# -- layers --------------------------------------------------------------------------------------------------


class Positions(nn.Module):
    """Adds a learned vector to each position: a parameter that no operator with a split backward uses."""

    def __init__(self, dropout: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(LENGTH, WIDTH, dtype=dtype))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x + self.table)


class Attention(nn.Module):
    """x + attention(norm(x)), causal, with dropout on the attention weights and on what is added."""

    def __init__(self, dropout: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, dtype=dtype)
        self.out = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, dim=-1))
        p = self.dropout.p if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        return x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))


class Mlp(nn.Module):
    """x + mlp(norm(x)), with dropout on what is added; ``norm`` is layer or batch."""

    def __init__(self, dropout: float, dtype: torch.dtype, norm: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype) if norm == "layer" else nn.BatchNorm1d(LENGTH, dtype=dtype)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, dtype=dtype)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False, dtype=dtype)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm(x)))))


def look_up(embedding: nn.Embedding, x: Tensor) -> Tensor:
    """x and what it finds in the table of an embedding: the rows, each by how much it is like x."""
    return x + (x @ embedding.weight.t()).tanh() @ embedding.weight / VOCABULARY


def read_out(embedding: nn.Embedding, x: Tensor) -> Tensor:
    """The table of an embedding used the other way round, as the output head."""
    return x @ embedding.weight.t() / WIDTH**0.5


def frozen(factory: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    """What the factory makes, not to be trained."""
    return factory(*args, **kwargs).requires_grad_(False)


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy over a micro-batch; output: (rows, length, vocabulary), targets: (rows, length)."""
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def transformer(recipe: Recipe) -> PipelineModule:
    """Embedding, positions, 4 × (attention, mlp), LayerNorm, head: 12 layers.

    Tied, the embedding's table is also the head, and a look-up in place of the last mlp: three uses, so that the order
    in which they are added shows in the last bit.
    """
    kind = {"dtype": recipe.dtype}
    embedding = partial(TiedLayerSpec, "tokens", nn.Embedding, VOCABULARY, WIDTH, **kind)
    blocks = [
        LayerSpec(Attention, recipe.dropout, recipe.dtype),
        LayerSpec(Mlp, recipe.dropout, recipe.dtype, recipe.norm),
    ]
    layers = [
        embedding() if recipe.tied else LayerSpec(nn.Embedding, VOCABULARY, WIDTH, **kind),
        LayerSpec(Positions, recipe.dropout, recipe.dtype),
        *blocks * 4,
        LayerSpec(nn.LayerNorm, WIDTH, **kind),
        embedding(forward=read_out) if recipe.tied else LayerSpec(nn.Linear, WIDTH, VOCABULARY, **kind),
    ]
    if recipe.tied:
        layers[9] = embedding(forward=look_up)
    for index in recipe.frozen:
        spec = layers[index]
        layers[index] = LayerSpec(frozen, spec.factory, *spec.args, **spec.kwargs)
    return PipelineModule(layers, loss_of)


# -- data ----------------------------------------------------------------------------------------------------


def micro_batches(count: int, step: int, data_rank: int = 0) -> list[Item]:
    """The items of one step: two rows each but the last, which has one; what to predict can be learned."""
    generator = torch.Generator().manual_seed(1000 * data_rank + step)
    items = []
    for number in range(count):
        inputs = torch.randint(0, VOCABULARY, (2 if number < count - 1 else 1, LENGTH), generator=generator)
        items.append(Item(inputs, (3 * inputs + 1) % VOCABULARY))
    return items


# -- optimizers ----------------------------------------------------------------------------------------------


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """SGD with momentum: what a rounding error does to it stays a rounding error."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """AdamW; eps is large enough that a gradient which is truly 0 does not turn rounding into a whole step."""
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-4)


class GradientsAsParameters(torch.optim.Optimizer):
    """Puts each gradient into its parameter's place, so that the model's state after a step *is* the gradients."""

    def __init__(self, parameters: Any, factor: float = 1.0) -> None:
        super().__init__(parameters, {})
        self.factor = factor

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.copy_(grad * self.factor)


def restless(parameters: Any) -> torch.optim.Optimizer:
    """Weights that are 8 × their last gradients: no bit of a gradient is lost, as it is where a small step is added to
    a large weight, and every one decides all that follows."""
    return GradientsAsParameters(parameters, factor=8.0)

"""The columns of the two grids of splits: each way in which a layer may use an operator, in each precision.

The rows stand in test_split.py, where they are modules, and in test_split_functional.py, where they are functions that
take a parameter or a view of one. Every row is run in every column, but where PyTorch itself cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Twice(nn.Module):
    """A module used twice on different inputs."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.inner(x.flip(0) if x.is_floating_point() else (x + 1) % 7).tanh()


class Checkpointed(nn.Module):
    """A module recomputed in backward."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda v: self.inner(v).sin(), x, use_reentrant=self.reentrant)


class AlsoElsewhere(nn.Module):
    """A module whose parameters are used once more, by an expression that is not recognised."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * sum(p.square().mean() for p in self.inner.parameters())


def frozen(dimensions: range) -> Callable[[nn.Module], nn.Module]:
    """The module with its parameters of so many dimensions not to be trained: matrices and kernels, or biases."""

    def freeze(module: nn.Module) -> nn.Module:
        for parameter in module.parameters():
            parameter.requires_grad_(parameter.dim() not in dimensions)
        return nn.Sequential(module, nn.Tanh())

    return freeze


class Way(NamedTuple):
    """What is made of the module, whether its input needs a gradient, and whether the engine recomputes it."""

    wrap: Callable[[nn.Module], nn.Module] = lambda module: module
    input_grad: bool = True
    recompute: bool = False


WAYS: dict[str, Way] = {
    "plain": Way(),
    "used twice": Way(Twice),
    "used elsewhere": Way(AlsoElsewhere),
    "weights frozen": Way(frozen(range(2, 9))),
    "biases frozen": Way(frozen(range(2))),
    "all frozen": Way(frozen(range(9))),
    "input without gradient": Way(input_grad=False),
    "checkpointed": Way(lambda m: Checkpointed(m, reentrant=False)),
    "checkpointed by re-entering": Way(lambda m: Checkpointed(m, reentrant=True)),
    "recomputed by the engine": Way(recompute=True),
}


class Precision(NamedTuple):
    """The type of the parameters, whether autocast to bfloat16 is on, and how far gradients may be from autograd's.

    The last is relative to the largest one. Autograd is under the same autocast, but may round once where two operators
    round twice, and what comes later magnifies that: ten times 1/256, by which bfloat16 rounds at most.
    """

    dtype: torch.dtype
    autocast: bool
    tolerance: float


PRECISIONS = {
    "float64": Precision(torch.float64, autocast=False, tolerance=1e-12),
    "autocast": Precision(torch.float32, autocast=True, tolerance=10 / 256),
}


def cells(
    rows: Iterable[str], columns: Iterable[str], impossible: Mapping[tuple[str, str], str]
) -> list[tuple[str, str, str]]:
    """The whole grid as (row, column, precision); ``impossible`` are pairs of a row and one of the others, and why."""
    every = product(rows, columns, PRECISIONS)
    return [cell for cell in every if not {(cell[0], cell[1]), (cell[0], cell[2])} & impossible.keys()]

"""A clock that only tests move, one a thread: what a layer is said to take is then measured to the last digit."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

_here = threading.local()


def now() -> float:
    """The seconds that the calling thread has spent."""
    spent: float = getattr(_here, "spent", 0.0)
    return spent


def spend(seconds: float) -> None:
    """Let time pass on the calling thread, without waiting."""
    _here.spent = now() + seconds


def taking(x: Tensor, seconds: float) -> Tensor:
    """A copy of ``x`` that takes so long, and its backward as long again."""
    copy: Tensor = _Takes.apply(x, seconds)
    return copy


class _Takes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        spend(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        spend(ctx.seconds)
        return gradients[0], None

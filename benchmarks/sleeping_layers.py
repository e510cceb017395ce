"""Layers that take exactly the time they are told: forward, gradient of the input, gradient of the weights."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn


class Sleep(nn.Module):
    """Sleeps ``forward``, ``input_grad`` and ``weight_grad`` seconds; the last as work of the layer's own queue.

    The small linear layer inside gives it a weight, whose split backward tells where W runs.
    """

    def __init__(self, forward: float, input_grad: float, weight_grad: float, size: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.times = (forward, input_grad, weight_grad)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.times[0])
        binding = getattr(self.linear.__dict__.get("forward"), "binding", None)
        return _Sleep.apply(self.linear(x), self.times, binding.current if binding is not None else None)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, times: tuple[float, float, float], queue: Any) -> Tensor:
        ctx.times, ctx.queue = times, queue
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        _, input_grad, weight_grad = ctx.times
        time.sleep(input_grad)
        if ctx.queue is None:
            time.sleep(weight_grad)
        else:
            ctx.queue.defer(lambda: time.sleep(weight_grad))
        return dy, None, None

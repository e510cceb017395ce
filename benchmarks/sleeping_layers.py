"""Layers that take exactly the time they are told: forward, gradient of the input, gradient of the weights."""

from __future__ import annotations

import ctypes
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

_INEXACT = 0.0001  # seconds by which a system may wake a process too late, when it is asked to be exact


def wake_exactly() -> None:
    """Ask the system not to collect the wake-ups of this thread, for which Linux takes 50 microseconds."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)  # PR_SET_TIMERSLACK, in nanoseconds


def sleep_until(moment: float) -> None:
    """Sleep until a moment of ``time.perf_counter``; the last of it is spent awake, so that it is not missed."""
    remaining = moment - time.perf_counter() - _INEXACT
    if remaining > 0:
        time.sleep(remaining)
    while time.perf_counter() < moment:
        pass


class Sleep(nn.Module):
    """Takes ``forward``, ``input_grad`` and ``weight_grad`` seconds; the last as work of the layer's own queue.

    The small linear layer inside gives it a weight, whose split backward tells where W runs.  Its forward is part
    of the time; what else a runtime does around a layer is not.
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
        sleep_until(time.perf_counter() + input_grad)
        if ctx.queue is None:
            time.sleep(weight_grad)
        else:
            ctx.queue.defer(lambda: time.sleep(weight_grad))
        return dy, None, None

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

    The small linear layer inside gives it a weight, whose split backward tells where W runs.  What it computes is
    part of the times; what a runtime does around the layer is not.
    """

    def __init__(self, forward: float, input_grad: float, weight_grad: float, size: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.times = (forward, input_grad, weight_grad)

    def forward(self, x: Tensor) -> Tensor:
        end = time.perf_counter() + self.times[0]
        binding = getattr(self.linear.__dict__.get("forward"), "binding", None)
        passage = _Passage(*self.times[1:], binding.current if binding is not None else None)
        y: Tensor = _Begins.apply(self.linear(_Ends.apply(x, passage, _ANCHOR)), passage)
        sleep_until(end)
        return y


class _Passage:
    """One micro-batch's backward through a layer: it begins, the linear layer's own comes, it ends."""

    def __init__(self, input_grad: float, weight_grad: float, queue: Any) -> None:
        self.input_grad, self.weight_grad, self.queue = input_grad, weight_grad, queue
        self.began = 0.0

    def end(self) -> None:
        sleep_until(self.began + self.input_grad)
        if self.queue is None:
            self.sleep_for_weights()
        else:
            self.queue.defer(self.sleep_for_weights)

    def sleep_for_weights(self) -> None:
        sleep_until(time.perf_counter() + self.weight_grad)


class _Begins(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, passage: _Passage) -> Tensor:
        ctx.passage = passage
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        ctx.passage.began = time.perf_counter()
        return dy, None


_ANCHOR = torch.zeros((), requires_grad=True)  # so that the first layer, whose input needs no gradient, has an end too


class _Ends(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, passage: _Passage, anchor: Tensor) -> Tensor:
        ctx.passage = passage
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        ctx.passage.end()
        return dy, None, None

"""Layers that take exactly the time they are told: forward, gradient of the input, gradient of the weights."""

from __future__ import annotations

import ctypes
import os
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


def stay_on_a_core(rank: int) -> None:
    """Keep this rank on one core, ranks dealt out in turn: it finds there what its last action left in the cache."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


def sleep_until(moment: float) -> None:
    """Sleep until a moment of ``time.perf_counter``; the last of it is spent awake, so that it is not missed."""
    remaining = moment - time.perf_counter() - _INEXACT
    if remaining > 0:
        time.sleep(remaining)
    while time.perf_counter() < moment:
        pass


class Sleep(nn.Module):
    """Takes ``forward``, ``input_grad`` and ``weight_grad`` seconds; the last as work of the layer's own queue.

    Nothing is computed: what a runtime does around the layer is all there is beside its times.  Of the linear layer
    only the place is used where the engine tells it of the queue, so that there is a W wherever a schedule puts it.
    """

    def __init__(self, forward: float, input_grad: float, weight_grad: float, *, last: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.times = (forward, input_grad, weight_grad)
        self.last = last  # gives one number, so that there is nothing left to do for a loss

    def forward(self, x: Tensor) -> Tensor:
        end = time.perf_counter() + self.times[0]
        binding = getattr(self.linear.__dict__.get("forward"), "binding", None)
        y: Tensor = _Sleeping.apply(x, _ANCHOR, self.times, None if binding is None else binding.current)
        y = y.sum() if self.last else y
        sleep_until(end)
        return y


class _Sleeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, times: tuple[float, float, float], queue: Any) -> Tensor:
        ctx.times, ctx.queue = times, queue
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        sleep_until(time.perf_counter() + ctx.times[1])

        def sleep_for_weights() -> None:
            sleep_until(time.perf_counter() + ctx.times[2])

        if ctx.queue is None:
            sleep_for_weights()
        else:
            ctx.queue.defer(sleep_for_weights)
        return dy, None, None, None


class SleepApart(nn.Module):
    """The same times for a runtime that finds I and W in autograd's graph: each is a function of its own there."""

    def __init__(self, forward: float, input_grad: float, weight_grad: float, *, last: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))
        self.times = (forward, input_grad, weight_grad)
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        end = time.perf_counter() + self.times[0]
        if not x.requires_grad:
            x = x.detach().requires_grad_()
        y = _SleepingBackward.apply(x, self.times[1]) + _SleepingBackward.apply(self.weight, self.times[2])
        y = y.sum() if self.last else y
        sleep_until(end)
        return y


class _SleepingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        sleep_until(time.perf_counter() + ctx.seconds)
        return dy.contiguous(), None  # torch's runtime cannot send what is not


_ANCHOR = torch.zeros((), requires_grad=True)  # so that the first layer, whose input needs no gradient, has a graph too

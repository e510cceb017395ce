"""Linear layers whose backward gives the input's gradient and leaves the weight's to a queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.gradients.queue import WeightGradQueue
from pipeline.gradients.site import Site


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, site: Site, queue: WeightGradQueue) -> Tensor:
    """`x @ weight.T + bias`; x: (..., in), weight: (out, in), bias: (out), result: (..., out)."""
    return _apply(x, weight, bias, site, queue)


def accumulate(gradient: Tensor, x: Tensor, dy: Tensor, site: Site) -> None:
    """Add dYᵀ X into the weight's gradient, in the gradient's dtype; x: (..., in), dy: (rows, out)."""
    rows = x.reshape(-1, x.shape[-1])
    if rows.dtype is not gradient.dtype:
        rows = site.scratch.cast("input", rows, gradient.dtype)
        dy = site.scratch.cast("output", dy, gradient.dtype)
    gradient.addmm_(dy.t(), rows)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, site: Site, queue: WeightGradQueue
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.site = site
        ctx.queue = queue
        if weight.dtype is not x.dtype:
            # Cast here and not by autocast, whose cache would keep a copy without a graph for later uses.
            weight = weight.to(x.dtype)
            bias = None if bias is None else bias.to(x.dtype)
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        queue: WeightGradQueue = ctx.queue
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        x, weight = ctx.saved_tensors
        dx = dy.matmul(weight.to(dy.dtype)) if needs_input else None
        rows = dy.reshape(-1, dy.shape[-1])
        if not queue.is_open or torch.is_grad_enabled():
            dw = rows.t().mm(x.reshape(-1, x.shape[-1])) if needs_weight else None
            return dx, dw, rows.sum(0) if needs_bias else None, None, None
        site: Site = ctx.site
        if queue.inline:
            accumulate(site.gradient, x, rows, site)
        else:
            queue.work.append((accumulate, site.gradient, x.detach(), rows, site))
        if not needs_bias:
            return dx, None, None, None, None
        if site.bias_gradient is None:
            return dx, None, rows.sum(0), None, None
        site.bias_gradient.add_(rows.sum(0, dtype=site.bias_gradient.dtype))
        return dx, None, None, None, None


# Function.apply adds a Python frame for torch.func transforms, under which the plain operator runs.
_apply: Callable[..., Tensor] = super(torch.autograd.Function, _Linear).apply

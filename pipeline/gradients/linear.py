"""Products of an activation and a weight whose backward leaves the weight's gradient to a queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.gradients.queue import WeightGradQueue
from pipeline.gradients.site import Operator, Site


def _accumulate(site: Site, x: Tensor, dy: Tensor) -> None:
    """Add dYᵀ X in one product without a temporary; x: (rows, in), dy: (rows, out)."""
    gradient = site.gradient
    if x.dtype is not gradient.dtype:
        scratch = site.binding.scratch
        x = scratch.cast("input", x, gradient.dtype)
        dy = scratch.cast("output", dy, gradient.dtype)
    gradient.addmm_(dy.t(), x)


def _product(site: Site, x: Tensor, dy: Tensor) -> Tensor:
    return dy.t().mm(x)


_is_grad_enabled = torch.is_grad_enabled

LINEAR = Operator(_accumulate, _product)


def _accumulate_bias(site: Site, gradient: Tensor, dy: Tensor) -> None:
    """Add the sum of the rows of dy, as a product: one pass, where a sum and an addition take two."""
    if dy.dtype is gradient.dtype:
        gradient.addmv_(dy.t(), site.binding.scratch.ones(gradient, len(dy)))
    else:
        gradient.add_(dy.sum(0, dtype=gradient.dtype))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, site: Site) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.site = site
        ctx.queue = site.binding.current
        plain = site.plain
        if plain.dtype is not x.dtype:
            # Cast here and not by autocast, whose cache would keep a copy without a graph for later uses.
            plain = plain.to(x.dtype)
            bias = None if bias is None else bias.to(x.dtype)
        return functional.linear(x, plain, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        site: Site = ctx.site
        queue: WeightGradQueue = ctx.queue
        if not queue.is_open or site.ordinary or _is_grad_enabled():
            return _ordinary(ctx, dy)
        x, _ = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, _ = ctx.needs_input_grad
        outputs, inputs = site.shape
        dx = None
        if needs_input:
            plain = site.plain
            dx = dy.matmul(plain if plain.dtype is dy.dtype else plain.to(dy.dtype))
        dy = dy.reshape(-1, outputs)
        if needs_weight:
            if queue.inline and not site.target.late:
                _accumulate(site, x.reshape(-1, inputs), dy)
            else:
                queue.work.append((site, x.detach().reshape(-1, inputs), dy))
        if not needs_bias:
            return dx, None, None, None
        if site.bias_gradient is None:
            return dx, None, dy.sum(0), None
        _accumulate_bias(site, site.bias_gradient, dy)
        return dx, None, None, None


def _ordinary(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """All gradients, differentiable once more."""
    x, weight = ctx.saved_tensors
    needs_input, needs_weight, needs_bias, _ = ctx.needs_input_grad
    outputs, inputs = ctx.site.shape
    rows = dy.reshape(-1, outputs)
    dx = dy.matmul(weight.to(dy.dtype)) if needs_input else None
    dw = rows.t().mm(x.reshape(-1, inputs)) if needs_weight else None
    return dx, dw, rows.sum(0) if needs_bias else None, None


# Function.apply puts a frame of Python before this for torch.func transforms, under which the plain
# operator runs.
linear: Callable[[Tensor, Tensor, Tensor | None, Site], Tensor] = super(torch.autograd.Function, _Linear).apply
"""`x @ weight.T + bias`; x: (..., in), weight: (out, in), bias: (out), result: (..., out)."""

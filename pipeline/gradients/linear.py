"""Products of an activation and a weight whose backward leaves the weight's gradient to a queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.gradients.direct import direct
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


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, site: Site) -> Tensor:
        # Weight and bias are here for the graph. Their aliases without one do the work: autocast keeps its casts of
        # parameters for later uses, and casts made here would have no graph.
        ctx.save_for_backward(x, weight)
        ctx.site = site
        ctx.queue = site.binding.current
        return functional.linear(x, site.plain, site.plain_bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        site: Site = ctx.site
        queue: WeightGradQueue = ctx.queue
        if not queue.is_open or site.ordinary or _is_grad_enabled():
            return _ordinary(ctx, dy)
        x, _ = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, _ = ctx.needs_input_grad
        outputs, inputs = site.shape
        uniform = dy.dtype is site.dtype
        dx = None
        if needs_input:
            dx = dy.matmul(site.plain if uniform else site.plain.to(dy.dtype))
        rows = dy.reshape(-1, outputs)
        columns = rows.t()
        if needs_weight:
            if site.target.late or not queue.inline:
                kept = x.detach().reshape(-1, inputs)
                queue.work.append((site, kept, rows, kept._version))
            elif uniform:
                site.gradient.addmm_(columns, x.reshape(-1, inputs))
            else:
                _accumulate(site, x.reshape(-1, inputs), rows)
        if not needs_bias:
            return dx, None, None, None
        if site.bias_gradient is None:
            return dx, None, rows.sum(0), None
        if uniform:
            # As a product: one pass, where a sum and an addition take two.
            site.bias_gradient.addmv_(columns, site.ones[rows.size(0)])
        else:
            site.bias_gradient.add_(rows.sum(0, dtype=site.bias_gradient.dtype))
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


linear: Callable[[Tensor, Tensor, Tensor | None, Site], Tensor] = direct(_Linear)
"""`x @ weight.T + bias`; x: (..., in), weight: (out, in), bias: (out), result: (..., out); both are the site's."""

"""Convolutions of one to three dimensions whose backward leaves the kernel's gradient to a queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline.gradients.queue import WeightGradQueue
from pipeline.gradients.site import Operator, Site


class Geometry(NamedTuple):
    """How the kernel moves, one number a spatial dimension, and the groups of channels: the details of a site."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def _accumulate(site: Site, x: Tensor, dy: Tensor) -> None:
    """Add the kernel's gradient; the library has no form that adds, so a kernel's size is taken for a moment."""
    gradient = site.gradient
    scratch = site.binding.scratch
    x = scratch.cast("input", x, gradient.dtype)
    dy = scratch.cast("output", dy, gradient.dtype)
    gradient.add_(_product(site, x, dy))


def _product(site: Site, x: Tensor, dy: Tensor) -> Tensor:
    # Of the weight only form and dtype are read; the gradient has them, and the parameter may not be at hand.
    like = site.gradient if site.gradient.dtype is x.dtype else torch.empty_like(site.gradient, dtype=x.dtype)
    product: Tensor = _backward(site, x, dy, like, (False, True, False))[1]
    return product


def _backward(
    site: Site, x: Tensor, dy: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool]
) -> tuple[Any, Any, Any]:
    """Gradients of (input, kernel, bias): tensors where they are wanted, else None."""
    stride, padding, dilation, groups = site.details
    gradients: tuple[Any, Any, Any] = torch.ops.aten.convolution_backward(
        dy, x, weight, [weight.shape[0]], stride, padding, dilation, False, [0] * len(stride), groups, wanted
    )
    return gradients


CONVOLUTION = Operator(_accumulate, _product)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, site: Site) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.site = site
        ctx.queue = site.binding.current
        stride, padding, dilation, groups = site.details
        plain = site.plain.to(x.dtype)
        bias = None if site.plain_bias is None else site.plain_bias.to(x.dtype)
        return torch.convolution(x, plain, bias, stride, padding, dilation, False, [0] * len(stride), groups)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        site: Site = ctx.site
        queue: WeightGradQueue = ctx.queue
        x, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, _ = ctx.needs_input_grad
        if not queue.is_open or site.ordinary or torch.is_grad_enabled():
            wanted = (needs_input, needs_weight, needs_bias)
            return *_backward(site, x, dy, weight.to(dy.dtype), wanted), None
        here = needs_bias and site.bias_gradient is None
        dx, _, db = _backward(site, x, dy, site.plain.to(dy.dtype), (needs_input, False, here))
        if needs_weight:
            if queue.inline and not site.target.late:
                _accumulate(site, x, dy)
            else:
                queue.work.append((site, x.detach(), dy, x._version))
        if needs_bias and site.bias_gradient is not None:
            site.bias_gradient.add_(dy.sum((0, *range(2, dy.dim())), dtype=site.bias_gradient.dtype))
        return dx, None, db, None


convolution: Callable[[Tensor, Tensor, Tensor | None, Site], Tensor] = super(
    torch.autograd.Function, _Convolution
).apply
"""x: (batch, in, *space), weight: (out, in / groups, *kernel), bias: (out), result: (batch, out, *space)."""

"""Convolutions of one to three dimensions whose backward leaves the kernel's gradient to a queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline.gradients.queue import WeightGradQueue
from pipeline.gradients.site import Site


class Geometry(NamedTuple):
    """How the kernel moves: one number a spatial dimension, and the number of channel groups."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, site: Site, queue: WeightGradQueue
) -> Tensor:
    """x: (batch, in, *space), weight: (out, in / groups, *kernel), bias: (out), result: (batch, out, *space)."""
    return _apply(x, weight, bias, geometry, site, queue)


def accumulate(gradient: Tensor, x: Tensor, dy: Tensor, details: tuple[Geometry, Site]) -> None:
    """Add the kernel's gradient; the library has no form that adds, so that a kernel's size is taken for a moment."""
    geometry, site = details
    x = site.scratch.cast("input", x, gradient.dtype)
    dy = site.scratch.cast("output", dy, gradient.dtype)
    # Only the kernel's shape is read, so that a parameter that is not at hand now is not needed.
    _, product, _ = _backward(dy, x, gradient, geometry, (False, True, False))
    if product is not None:
        gradient.add_(product)


def _backward(
    dy: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, mask: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    stride, padding, dilation, groups = geometry
    result: tuple[Tensor | None, Tensor | None, Tensor | None] = torch.ops.aten.convolution_backward(
        dy, x, weight, [weight.shape[0]], stride, padding, dilation, False, [0] * len(stride), groups, mask
    )
    return result


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        geometry: Geometry,
        site: Site,
        queue: WeightGradQueue,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.details = (geometry, site)
        ctx.queue = queue
        weight = weight.to(x.dtype)
        bias = None if bias is None else bias.to(x.dtype)
        stride, padding, dilation, groups = geometry
        return torch.convolution(x, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        queue: WeightGradQueue = ctx.queue
        geometry, site = ctx.details
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        x, weight = ctx.saved_tensors
        weight = weight.to(dy.dtype)
        if not queue.is_open or torch.is_grad_enabled():
            mask = (needs_input, needs_weight, needs_bias)
            return *_backward(dy, x, weight, geometry, mask), None, None, None
        if queue.inline:
            accumulate(site.gradient, x, dy, ctx.details)
        else:
            queue.work.append((accumulate, site.gradient, x.detach(), dy, ctx.details))
        dx = _backward(dy, x, weight, geometry, (True, False, False))[0] if needs_input else None
        if not needs_bias:
            return dx, None, None, None, None, None
        summed = (0, *range(2, dy.dim()))
        if site.bias_gradient is None:
            return dx, None, dy.sum(summed), None, None, None
        site.bias_gradient.add_(dy.sum(summed, dtype=site.bias_gradient.dtype))
        return dx, None, None, None, None, None


_apply: Callable[..., Tensor] = super(torch.autograd.Function, _Convolution).apply

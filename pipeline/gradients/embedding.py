"""Embeddings whose backward leaves the table's gradient to a queue, which adds the rows in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pipeline.gradients.queue import WeightGradQueue
from pipeline.gradients.site import Site


def embedding(
    indices: Tensor, weight: Tensor, padding_idx: int, site: Site, queue: WeightGradQueue
) -> Tensor:
    """Rows of the table; indices: (...), weight: (rows, width), result: (..., width); padding_idx -1: none."""
    return _apply(weight, indices, padding_idx, site, queue)


def accumulate(gradient: Tensor, indices: Tensor, dy: Tensor, details: tuple[int, Site]) -> None:
    """Add each row of dy into the row of the table's gradient that it came from, without a table of its own."""
    padding_idx, site = details
    flat = indices.reshape(-1)
    rows = site.scratch.cast("output", dy.reshape(-1, dy.shape[-1]), gradient.dtype)
    kept = gradient[padding_idx].clone() if padding_idx >= 0 else None
    if gradient.is_cuda:
        # index_add_ adds there in an order that changes from run to run; this sorts.
        gradient.index_put_((flat,), rows, accumulate=True)
    else:
        gradient.index_add_(0, flat, rows)
    if kept is not None:
        gradient[padding_idx] = kept


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, indices: Tensor, padding_idx: int, site: Site, queue: WeightGradQueue
    ) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.details = (padding_idx, site)
        ctx.queue = queue
        return torch.embedding(weight, indices, padding_idx)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        queue: WeightGradQueue = ctx.queue
        (indices,) = ctx.saved_tensors
        padding_idx, site = ctx.details
        if not queue.is_open or torch.is_grad_enabled():
            rows = site.weight.shape[0]
            dw = torch.ops.aten.embedding_dense_backward(dy, indices, rows, padding_idx, False)
            return dw, None, None, None, None
        if queue.inline:
            accumulate(site.gradient, indices, dy, ctx.details)
        else:
            queue.work.append((accumulate, site.gradient, indices, dy, ctx.details))
        return None, None, None, None, None


_apply: Callable[..., Tensor] = super(torch.autograd.Function, _Embedding).apply

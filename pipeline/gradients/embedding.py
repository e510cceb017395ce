"""Embeddings whose backward leaves the table's gradient to a queue, which adds the rows in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pipeline.gradients.queue import WeightGradQueue
from pipeline.gradients.site import Operator, Site

NO_PADDING = -1
"""The row that gets no gradient, where there is none; a site's details are this row."""


def _accumulate(site: Site, indices: Tensor, dy: Tensor) -> None:
    """Add each row of dy into the row of the table's gradient that it came from, without a table of its own."""
    gradient: Tensor = site.gradient
    padding_idx: int = site.details
    dy = site.binding.scratch.cast("output", dy, gradient.dtype)
    kept = None if padding_idx == NO_PADDING else gradient[padding_idx].clone()
    if gradient.is_cuda:
        # index_add_ adds there in an order that changes from run to run; this sorts.
        gradient.index_put_((indices,), dy, accumulate=True)
    else:
        gradient.index_add_(0, indices, dy)
    if kept is not None:
        gradient[padding_idx] = kept


def _product(site: Site, indices: Tensor, dy: Tensor) -> Tensor:
    return _dense(dy, indices, len(site.gradient), site.details)


def _dense(dy: Tensor, indices: Tensor, rows: int, padding_idx: int) -> Tensor:
    table: Tensor = torch.ops.aten.embedding_dense_backward(dy, indices, rows, padding_idx, False)
    return table


EMBEDDING = Operator(_accumulate, _product)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, indices: Tensor, weight: Tensor, site: Site) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.site = site
        ctx.queue = site.binding.current
        return torch.embedding(site.plain, indices, site.details)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (indices,) = ctx.saved_tensors
        site: Site = ctx.site
        queue: WeightGradQueue = ctx.queue
        if not queue.is_open or site.ordinary or torch.is_grad_enabled():
            return None, _dense(dy, indices, len(site.gradient), site.details), None
        indices, dy = indices.reshape(-1), dy.reshape(-1, dy.shape[-1])
        if queue.inline and not site.target.late:
            _accumulate(site, indices, dy)
        else:
            queue.work.append((site, indices, dy, indices._version))
        return None, None, None


embedding: Callable[[Tensor, Tensor, Site], Tensor] = super(torch.autograd.Function, _Embedding).apply
"""Rows of a table; indices: (...), weight: (rows, width), result: (..., width)."""

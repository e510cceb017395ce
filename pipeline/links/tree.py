"""A sum over all ranks of a link, up a binomial tree and down again: few messages, for vectors of a few numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.links.protocol import LANE_AGREEMENT, Link

__all__ = ["parent_and_children", "sum_over_ranks"]


def parent_and_children(rank: int, ranks: int) -> tuple[int | None, list[int]]:
    """The neighbours of a rank in the binomial tree whose root is rank 0, children with the smallest subtree first.

        0 ── 1      ranks 1, 2 and 4 are children of 0: each clears its lowest set bit to find its parent
        ├─── 2 ─ 3
        └─── 4 ─ 5
    """
    children = []
    bit = 1
    while bit < ranks and not rank & bit:
        if rank + bit < ranks:
            children.append(rank + bit)
        bit *= 2
    return (rank & (rank - 1) if rank else None), children


def sum_over_ranks(link: Link, vector: Tensor) -> None:
    """Replace a contiguous vector in host memory by its sum over all ranks, the same bits on each.  Collective.

    Raises ``LinkError`` when a neighbour in the tree is gone or does not come in time.
    """
    parent, children = parent_and_children(link.rank, link.ranks)
    received = [torch.empty_like(vector) for _ in children]
    for transfer in [link.receive(c, b, LANE_AGREEMENT) for c, b in zip(children, received, strict=True)]:
        transfer.wait()
    for part in received:
        vector += part
    if parent is not None:
        link.send(parent, vector, LANE_AGREEMENT).wait()
        link.receive(parent, vector, LANE_AGREEMENT).wait()
    for transfer in [link.send(child, vector, LANE_AGREEMENT) for child in reversed(children)]:
        transfer.wait()

"""The rows of a step, in whatever items they come, cut into micro-batches of one size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from pipeline.batch import Item, items_of
from pipeline.errors import DataError

__all__ = ["read_rows"]


def read_rows(source: Any, rows: int, micro_batches: int) -> tuple[list[Item], int]:
    """Take items until they hold ``rows`` rows, and cut these into ``micro_batches`` equal ones, in order; also returns
    how many items were taken.

    The rows of an item are the leading size of its tensors; what is no tensor, or has no dimension, goes to all and
    must be the same in all items.  Where the iterator ends early there are fewer micro-batches, and the last may be
    smaller.  Raises ``DataError`` where whole items do not add up to ``rows``, or have no common size.
    """
    taken: list[Item] = []
    sizes: list[int] = []
    for item in items_of(source):
        taken.append(item)
        sizes.append(_rows(item))
        if sum(sizes) > rows:
            raise DataError(
                f"items of {', '.join(map(str, sizes))} rows do not add up to {rows}, which are this data-parallel "
                "rank's part of global_batch; let global_batch be a multiple of the rows of an item times data_parallel"
            )
        if sum(sizes) == rows:
            break
    each = rows // micro_batches
    if all(size == each for size in sizes):
        return taken, len(taken)
    return _cut(taken, sum(sizes), each), len(taken)


def _rows(item: Item) -> int:
    leaves, _ = tree_flatten((item.inputs, item.targets))
    sizes = {int(leaf.shape[0]) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
    if len(sizes) != 1 or 0 in sizes:
        raise DataError(
            "with global_batch all tensors of an item have its rows as their leading size, so that it can be cut; "
            f"found leading sizes {sorted(sizes)}"
        )
    return sizes.pop()


def _cut(items: Sequence[Item], rows: int, each: int) -> list[Item]:
    flat = [tree_flatten((item.inputs, item.targets)) for item in items]
    structures = [structure for _, structure in flat]
    if any(structure != structures[0] for structure in structures):
        raise DataError("items of one step differ in structure, so that they cannot be joined")
    count = -(-rows // each)
    parts = [_parts(leaves, each, count) for leaves in zip(*(leaves for leaves, _ in flat), strict=True)]
    return [Item(*tree_unflatten([part[i] for part in parts], structures[0])) for i in range(count)]


def _parts(leaves: Sequence[Any], each: int, count: int) -> Sequence[Any]:
    """One leaf of all items, as the leaf of every micro-batch."""
    first = leaves[0]
    if isinstance(first, Tensor) and first.dim():
        return torch.split(first if len(leaves) == 1 else torch.cat(list(leaves)), each)
    same = all(torch.equal(first, leaf) if isinstance(first, Tensor) else first == leaf for leaf in leaves)
    if not same:
        raise DataError("items of one step hold different values that are no rows, so that they cannot be joined")
    return [first] * count

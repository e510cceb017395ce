"""Micro-batches: cutting a whole batch into them, and reading a step's worth of them from an iterator."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from pipeline.errors import DataError

__all__ = ["Item", "items_of", "read_items", "rows_of", "split_batch"]


class Item(NamedTuple):
    """One micro-batch: what goes into the first layer, and what the loss compares with."""

    inputs: Any
    targets: Any


def split_batch(batch: Any, micro_batches: int, *, split: Mapping[str, bool] | None = None) -> list[Item]:
    """Cut a whole batch ``(inputs, targets)`` into micro-batches as even as possible, the larger ones first.

    The size of the batch is the leading size of the first tensor of the inputs.  A tensor of that leading size is
    cut; scalars, numbers and inputs of any other leading size go whole to every micro-batch.  What could be meant
    both ways must be declared with ``split={"inputs[1]": False}``, by the path of the leaf.

    Raises ``DataError`` for an ambiguous leaf, an unknown path, or fewer samples than micro-batches.
    """
    if not isinstance(batch, tuple) or len(batch) != 2:
        raise DataError(f"a batch is a pair (inputs, targets), targets may be None; got {_kind(batch)}")
    with_paths, structure = tree_flatten_with_path(batch)
    names = [_name(path) for path, _ in with_paths]
    leaves = [leaf for _, leaf in with_paths]
    declared = dict(split or {})
    unknown = sorted(set(declared) - set(names))
    if unknown:
        raise DataError(f"split names {unknown[0]!r}, but the leaves of the batch are {', '.join(names)}")
    size = _batch_size(names, leaves, declared)
    if not 1 <= micro_batches <= size:
        raise DataError(f"cannot cut {size} samples into {micro_batches} micro-batches; set micro_batches to 1..{size}")
    cut = [_is_cut(n, leaf, size, declared, leaves) for n, leaf in zip(names, leaves, strict=True)]
    sizes = [size // micro_batches + (i < size % micro_batches) for i in range(micro_batches)]
    parts = [
        torch.split(leaf, sizes) if is_cut else [leaf] * micro_batches for leaf, is_cut in zip(leaves, cut, strict=True)
    ]
    return [Item(*tree_unflatten([part[i] for part in parts], structure)) for i in range(micro_batches)]


def _name(path: tuple[Any, ...]) -> str:
    return ("inputs", "targets")[path[0].idx] + keystr(path[1:])


def _batch_size(names: list[str], leaves: list[Any], declared: dict[str, bool]) -> int:
    for name, leaf in zip(names, leaves, strict=True):
        if isinstance(leaf, Tensor) and leaf.dim() and declared.get(name, name.startswith("inputs")):
            return int(leaf.shape[0])
    raise DataError("the inputs hold no tensor with a leading dimension, so the batch has no size to cut")


def _is_cut(name: str, leaf: Any, size: int, declared: dict[str, bool], leaves: list[Any]) -> bool:
    if not isinstance(leaf, Tensor) or leaf.dim() == 0:
        if declared.get(name):
            raise DataError(f"split declares {name} as cut, but it has no leading dimension")
        return False
    fits = leaf.shape[0] == size
    if name in declared:
        if declared[name] and not fits:
            raise DataError(f"split declares {name} as cut, but its leading size is {leaf.shape[0]}, not {size}")
        return declared[name]
    if not fits and name.startswith("targets"):
        raise DataError(
            f"{name} has {leaf.shape[0]} rows but the batch has {size}; declare split={{{name!r}: False}} "
            "if every micro-batch is to get all of it"
        )
    other_sizes = {n for other in leaves if isinstance(other, Tensor) for n in other.shape[1:]}
    if fits and leaf.dim() == 1 and size in other_sizes:
        raise DataError(
            f"{name} is a vector of {size}, which is the batch's size and also another dimension's: "
            f"declare split={{{name!r}: True}} to cut it or False to hand it whole to every micro-batch"
        )
    return fits


def read_items(source: Any, count: int) -> list[Item]:
    """Read up to ``count`` micro-batches; fewer when the iterator ends early.

    ``source`` is an iterator, or a list or tuple of at most ``count`` items.  Other iterables are refused: they
    would start again from their beginning at every step.
    """
    if isinstance(source, list | tuple) and len(source) > count:
        raise DataError(
            f"got a list of {len(source)} items for a step of {count} micro-batches; pass an iterator to take "
            f"them step by step, or set micro_batches={len(source)}"
        )
    return list(itertools.islice(items_of(source), count))


def items_of(source: Any) -> Iterator[Item]:
    """The items of an iterator, a list or a tuple, each checked as it is taken."""
    if isinstance(source, list | tuple):
        source = iter(source)
    if not isinstance(source, Iterator):
        raise DataError(
            f"takes an iterator of (inputs, targets), got {_kind(source)}; make one once with iter(...) and pass "
            "the same one to every step"
        )
    for item in source:
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise DataError(f"an item is a pair (inputs, targets), targets may be None; got {_kind(item)}")
        yield Item(*item)


def rows_of(item: Item) -> int | None:
    """Rows of a micro-batch: the leading size of its first tensor that has one, None where there is no such tensor."""
    leaves, _ = tree_flatten(tuple(item))
    return next((len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() and len(leaf)), None)


def _kind(value: object) -> str:
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, tuple | list) else "")

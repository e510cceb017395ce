"""What layers keep beside parameters and buffers, by which memory that grows from step to step is found."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Set
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor

from pipeline.layer import Layer

__all__ = ["ELSEWHERE", "kept_by_layer"]

ELSEWHERE = "outside of the layers"


def kept_by_layer(layers: Iterable[Layer], known: Set[int], *, elsewhere: bool) -> dict[str, float]:
    """Bytes of the tensors that can be reached from each layer, by its name, and of those elsewhere in this process, if
    these are asked for.

    ``known`` are the storages that are accounted for.  What only a graph of autograd holds cannot be seen: whoever
    keeps an output keeps more than is told.
    """
    seen = set(known)
    found = {f"layer {layer.name}": _reached([layer.function, layer.module], seen) for layer in layers}
    if elsewhere:
        found[ELSEWHERE] = sum(_size(thing, seen) for thing in gc.get_objects() if issubclass(type(thing), Tensor))
    return found


def _reached(roots: list[Any], seen: set[int]) -> float:
    """Bytes of storages that have not been seen, of all tensors to which a way leads from these."""
    total, visited, left = 0.0, set[int](), list(roots)
    while left:
        thing = left.pop()
        if id(thing) in visited or isinstance(thing, type | ModuleType):
            continue
        visited.add(id(thing))
        if isinstance(thing, Tensor):
            total += _size(thing, seen)
        elif isinstance(thing, FunctionType):  # of its module's globals it owns nothing
            left += [thing.__closure__, thing.__defaults__, thing.__kwdefaults__]
        elif gc.is_tracked(thing):
            left += gc.get_referents(thing)
    return total


def _size(tensor: Tensor, seen: set[int]) -> float:
    """Bytes of a tensor's storage, if it has one that was not seen before."""
    try:
        storage = tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):  # sparse ones, and those that a compiler only thinks of
        return 0.0
    if storage._cdata in seen:
        return 0.0
    seen.add(storage._cdata)
    return float(storage.nbytes())

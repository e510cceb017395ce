"""In which type each layer computes: by patterns over types of layers, tie keys and numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from pipeline.errors import ConfigError
from pipeline.module import PipelineModule, TiedLayerSpec

__all__ = ["Cast", "cast_for", "loss_cast", "types_of"]

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Cast = Callable[[Tensor], Tensor]


def types_of(precision: Sequence[tuple[str, str]], module: PipelineModule) -> tuple[torch.dtype | None, ...]:
    """The type of each layer, None where it stays as its constructor makes it.

    A pattern matches a layer's number, the name of its type, or the key it is tied by, in any case of letters; the last
    that matches counts.  Raises ``ConfigError`` for a pattern that no layer matches, and where layers that are tied
    would have different types.
    """
    names = [_names(module, index) for index in range(len(module))]
    for pattern, _ in precision:
        if not any(fnmatchcase(name, pattern.lower()) for of_layer in names for name in of_layer):
            there = ", ".join(dict.fromkeys(module.type_of(index) for index in range(len(module))))
            raise ConfigError(
                f"precision names {pattern!r}, which no layer matches; there are layers 0 to {len(module) - 1}, of the "
                f"types {there}"
            )
    found = [_type(precision, of_layer) for of_layer in names]
    for tie in module.ties():
        first, *others = dict.fromkeys(use.layer for use in tie.uses)
        for other in others:
            if found[other] != found[first]:
                raise ConfigError(
                    f"precision gives layers {first} and {other}, which are tied as {tie.name!r}, different types; "
                    "name them by one pattern, such as the key they are tied by"
                )
    return tuple(found)


def _names(module: PipelineModule, index: int) -> list[str]:
    entry = module.entries[index]
    names = [str(index), module.type_of(index)]
    if isinstance(entry, TiedLayerSpec):
        names.append(entry.key)
    return [name.lower() for name in names]


def _type(precision: Sequence[tuple[str, str]], names: Sequence[str]) -> torch.dtype | None:
    matching = [kind for pattern, kind in precision if any(fnmatchcase(name, pattern.lower()) for name in names)]
    return _TYPES[matching[-1]] if matching else None


def cast_for(dtype: torch.dtype | None) -> Cast | None:
    """What brings floating-point tensors into this type and leaves others as they are; None where there is none."""
    return None if dtype is None else lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor


def loss_cast(types: Sequence[torch.dtype | None]) -> Cast | None:
    """What brings a loss's inputs into a type that it can be computed in, where some layer has been given a type."""
    return _widened if any(types) else None


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor

"""What a value that crosses from layer to layer looks like: its structure, shapes, types and constants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

__all__ = ["Constant", "Form", "TensorForm", "Value", "fits", "flatten", "form_of", "unflatten"]


class TensorForm(NamedTuple):
    """One tensor of a value; ``needs_gradient`` tells whether a gradient flows back for it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool


class Constant(NamedTuple):
    """A leaf that is not a tensor: it crosses as it is."""

    value: Any


class Form(NamedTuple):
    """Everything that must be known to receive a value; ``structure`` is None for a single tensor."""

    structure: TreeSpec | None
    leaves: tuple[TensorForm | Constant, ...]

    def __str__(self) -> str:
        return "(" + ", ".join(map(_shown, self.leaves)) + ")"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as a nesting of numbers, since torch's classes for structures warn when they are unpickled."""
        return _unpickled, (unflatten(range(len(self.leaves)), self.structure) if self.structure is not None else None, self.leaves)


def _unpickled(nesting: Any, leaves: tuple[TensorForm | Constant, ...]) -> Form:
    return Form(None if nesting is None else tree_flatten(nesting)[1], leaves)


def _shown(leaf: TensorForm | Constant) -> str:
    if isinstance(leaf, Constant):
        return repr(leaf.value)
    return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"


class Value(NamedTuple):
    """A value in flight: its leaves, how they nest, and for which of them a gradient flows back."""

    leaves: Sequence[Any]
    structure: TreeSpec | None
    needs_gradient: tuple[bool, ...]


def flatten(value: Any) -> tuple[list[Any], TreeSpec | None]:
    """The leaves of a nesting of tensors, and its structure; a lone tensor is its own leaf."""
    if isinstance(value, Tensor):
        return [value], None
    return tree_flatten(value)


def unflatten(leaves: Sequence[Any], structure: TreeSpec | None) -> Any:
    """The inverse of ``flatten``."""
    return leaves[0] if structure is None else tree_unflatten(leaves, structure)


def form_of(value: Value) -> Form:
    """The form of a value, to be compared with what was agreed or sent ahead as a header."""
    return Form(
        value.structure,
        tuple(
            TensorForm(tuple(leaf.shape), leaf.dtype, needs) if isinstance(leaf, Tensor) else Constant(leaf)
            for leaf, needs in zip(value.leaves, value.needs_gradient, strict=True)
        ),
    )


def fits(value: Value, form: Form) -> bool:
    """Whether a value can be sent where ``form`` was agreed.

    A tensor that needs no gradient this time fits where one was agreed: its gradient is dropped on return.
    """
    if len(value.leaves) != len(form.leaves) or value.structure != form.structure:
        return False
    for leaf, needs, expected in zip(value.leaves, value.needs_gradient, form.leaves, strict=True):
        if isinstance(expected, Constant):
            if type(leaf) is not type(expected.value) or leaf != expected.value:
                return False
        elif (
            not isinstance(leaf, Tensor)
            or leaf.shape != expected.shape
            or leaf.dtype != expected.dtype
            or (needs and not expected.needs_gradient)
        ):
            return False
    return True

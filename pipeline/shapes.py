"""What a value that crosses from layer to layer looks like: structure, shapes, types, order in memory, constants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_iter, tree_unflatten

__all__ = [
    "Constant",
    "Form",
    "Order",
    "Same",
    "TensorForm",
    "Value",
    "entering",
    "fits",
    "flatten",
    "form_of",
    "hides_gradient",
    "memory",
    "memory_order",
    "settled",
    "signature_of",
    "unflatten",
]

_OPEN = (Tensor, bool, int, float, complex, str, bytes, type(None))

Order = tuple[int, ...] | None
"""The dimensions of a tensor as they lie in memory, the outermost first; None where that is their own order."""


class TensorForm(NamedTuple):
    """One tensor of a value; ``needs_gradient`` tells whether a gradient flows back for it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool
    order: Order = None

    def empty(self, device: torch.device) -> Tensor:
        """A tensor of this form, uninitialised."""
        if self.order is None:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        lying = torch.empty([self.shape[d] for d in self.order], dtype=self.dtype, device=device)
        return lying.permute(sorted(range(len(self.order)), key=self.order.__getitem__))


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A leaf that is not a tensor: it crosses as it is."""

    value: Any

    def __eq__(self, other: object) -> bool:
        """Whether it is the same value of the same type; what cannot tell, such as an array, is always another one."""
        if not isinstance(other, Constant) or type(self.value) is not type(other.value):
            return False
        try:
            return bool(self.value == other.value)
        except Exception:
            return False

    def __hash__(self) -> int:
        return hash(self.value)


class Same(NamedTuple):
    """A leaf that is the very tensor which is the leaf at an earlier place: it crosses once and stays one."""

    place: int


@dataclass(frozen=True)
class Form:
    """Everything that must be known to receive a value; ``structure`` is None for a single tensor."""

    structure: TreeSpec | None
    leaves: tuple[TensorForm | Constant, ...]

    @cached_property
    def tensors(self) -> tuple[TensorForm, ...]:
        """What crosses forward."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorForm))

    @cached_property
    def returning(self) -> tuple[TensorForm, ...]:
        """What gets a gradient back."""
        return tuple(leaf for leaf in self.tensors if leaf.needs_gradient)

    @cached_property
    def needs_gradient(self) -> tuple[bool, ...]:
        """For which leaves a gradient flows back."""
        return tuple(isinstance(leaf, TensorForm) and leaf.needs_gradient for leaf in self.leaves)

    def __str__(self) -> str:
        return "(" + ", ".join(map(_shown, self.leaves)) + ")"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as a nesting of numbers, since torch's classes for structures warn when they are unpickled."""
        numbers = None if self.structure is None else tree_unflatten(range(len(self.leaves)), self.structure)
        return _unpickled, (numbers, self.leaves)


def _unpickled(numbers: Any, leaves: tuple[TensorForm | Constant, ...]) -> Form:
    return Form(None if numbers is None else tree_flatten(numbers)[1], leaves)


def _shown(leaf: TensorForm | Constant) -> str:
    if isinstance(leaf, Constant):
        return f"leaf {leaf.value.place} again" if isinstance(leaf.value, Same) else repr(leaf.value)
    return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"


class Value(NamedTuple):
    """A value in flight: its leaves, how they nest, and for which of them a gradient flows back."""

    leaves: Sequence[Any]
    structure: TreeSpec | None
    needs_gradient: tuple[bool, ...]


_PAIR = tree_flatten((None, None))[1]


def flatten(value: Any) -> tuple[list[Any], TreeSpec | None]:
    """The leaves of a nesting of tensors, and its structure; a lone tensor is its own leaf."""
    if isinstance(value, Tensor):
        return [value], None
    if type(value) is tuple and len(value) == 2 and isinstance(value[0], Tensor):  # the commonest, without a search
        second = value[1]
        if second is None or (isinstance(second, Tensor) and second is not value[0]):
            return [value[0], second], _PAIR
    leaves, structure = tree_flatten(value)
    places: dict[int, int] = {}
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and places.setdefault(id(leaf), place) != place:
            leaves[place] = Same(places[id(leaf)])
    return leaves, structure


def unflatten(leaves: Sequence[Any], structure: TreeSpec | None) -> Any:
    """The inverse of ``flatten``."""
    if structure is None:
        return leaves[0]
    if structure is _PAIR:
        return tuple(leaves)
    return tree_unflatten([leaves[x.place] if isinstance(x, Same) else x for x in leaves], structure)


def hides_gradient(leaf: Any) -> bool:
    """Whether a leaf is an object in which there are tensors that need a gradient: nothing would bring it to them."""
    if isinstance(leaf, _OPEN):
        return False
    inside = [*getattr(leaf, "__dict__", {}).values(), *(leaf if isinstance(leaf, set | frozenset) else ())]
    inside += [getattr(leaf, name, None) for name in getattr(type(leaf), "__slots__", ())]
    return any(isinstance(x, Tensor) and x.requires_grad for x in tree_iter(inside))


def entering(nesting: Any) -> Value:
    """What comes from outside of the model: no gradient flows back for any of it."""
    leaves, structure = flatten(nesting)
    return Value(leaves, structure, (False,) * len(leaves))


def form_of(value: Value) -> Form:
    """The form of a value, to be compared with what was agreed or sent ahead as a header."""
    return Form(
        value.structure,
        tuple(
            TensorForm(tuple(leaf.shape), leaf.dtype, needs, memory_order(leaf))
            if isinstance(leaf, Tensor)
            else Constant(leaf)
            for leaf, needs in zip(value.leaves, value.needs_gradient, strict=True)
        ),
    )


def signature_of(inputs: Any) -> Form:
    """The form of a micro-batch's inputs, from which those of all messages are taken to follow.

    What is not a tensor counts by its type: a number that is another one in each step does not make a new form.
    """
    leaves, structure = flatten(inputs)
    return Form(structure, tuple([_signature(leaf) for leaf in leaves]))


def _signature(leaf: Any) -> TensorForm | Constant:
    if isinstance(leaf, Tensor):
        return TensorForm(leaf.shape, leaf.dtype, False, memory_order(leaf))
    return Constant(type(leaf))


def fits(value: Value, form: Form) -> bool:
    """Whether a value can be sent where ``form`` was agreed.

    A tensor that needs no gradient this time fits where one was agreed: its gradient is dropped on return.
    """
    if len(value.leaves) != len(form.leaves) or value.structure != form.structure:
        return False
    for leaf, needs, expected in zip(value.leaves, value.needs_gradient, form.leaves, strict=True):
        if isinstance(expected, Constant):
            if isinstance(leaf, Tensor) or Constant(leaf) != expected:
                return False
        elif (
            not isinstance(leaf, Tensor)
            or leaf.shape != expected.shape
            or leaf.dtype != expected.dtype
            or memory_order(leaf) != expected.order
            or (needs and not expected.needs_gradient)
        ):
            return False
    return True


# -- order in memory -----------------------------------------------------------------------------------------
#
# Sums run in the order of memory, so that a tensor must lie in it in the same way whether it has crossed ranks or
# not.  Between layers it is dense: some order of its dimensions is contiguous.  That order crosses with it, and its
# gradient comes back in the same one.


def memory_order(tensor: Tensor) -> Order:
    """How the dimensions of a dense tensor lie in memory."""
    if tensor.is_contiguous():
        return None
    shape, strides = tensor.shape, tensor.stride()
    return tuple(sorted(range(len(shape)), key=lambda d: (shape[d] > 1, -strides[d])))


def settled(tensor: Tensor) -> Tensor:
    """The same values dense and as memory holds them: the tensor itself if it is so, else a copy without a graph."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.detach().resolve_conj().resolve_neg()
    order = memory_order(tensor)
    return tensor if order is None or tensor.permute(order).is_contiguous() else tensor.detach().contiguous()


def memory(tensor: Tensor) -> Tensor:
    """A contiguous view of all elements of a dense tensor, as a link takes it."""
    order = memory_order(tensor)
    return tensor if order is None else tensor.permute(order)

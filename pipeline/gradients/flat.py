"""A layer's parameters and gradients as views of contiguous vectors, one pair of vectors for each kind of parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pipeline.errors import GradientError

ALIGNMENT = 64
"""Bytes to which the start of every parameter is padded: a cache line, and the width of the widest vector load."""

FROZEN = -1
"""The group of parameters that need no gradient; they have vectors of their own."""


class Slot(NamedTuple):
    """Where one parameter lies: `numel` elements from `offset`, in the parameter and in the gradient vector alike."""

    name: str
    shape: torch.Size
    vector: int
    offset: int
    numel: int
    group: int

    @property
    def end(self) -> int:
        """One past the last element."""
        return self.offset + self.numel


class Sort(NamedTuple):
    """What keeps parameters of one dtype apart: the tie that they are in, and whether they are matrices."""

    tie: str = ""
    matrix: bool = True


class FlatVector(NamedTuple):
    """All parameters of one kind, and their gradients: as many elements, or none where they are frozen."""

    parameters: Tensor
    gradients: Tensor
    sort: Sort


class Segment(NamedTuple):
    """What one optimizer group owns of one vector: elements start to stop, padding (always 0) included."""

    group: int
    vector: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class _Trainable:
    """A trainable parameter, its gradient as operators see it and as autograd sees it: the same memory.

    `preset` has a version counter of its own (a view shares its base's), so that its version counts what autograd alone
    has added. The module holds the parameter as `owner[key]`.
    """

    slot: Slot
    parameter: nn.Parameter
    gradient: Tensor
    preset: Tensor
    hook: RemovableHandle | None
    owner: Mapping[str, nn.Parameter | None]
    key: str

    @property
    def widened(self) -> bool:
        return self.hook is not None


class FlatLayer:
    """Moves a module's parameters into contiguous vectors and gives it gradients that accumulate in place.

    Gradients have the wider of float32 and the parameter's dtype (or `accumulate_dtype`). Where that is the
    parameter's own dtype, `parameter.grad` is preset to a view of the gradient vector, and autograd adds
    into it; where it is wider, a hook adds what autograd brings into the view and drops it, and
    `parameter.grad` is None between backwards.

    `group_of(name, parameter)` numbers the optimizer groups from 0: the parameters of one group lie side by
    side. Parameters of one dtype and device, frozen or not, for which `sort_of(name, parameter)` is equal, lie in one
    vector; its length is a multiple of `parts`, so that as many ranks can hold equal parts of it, and with `uncut` none
    of these cuts a parameter. One that the module holds under two names is one slot, under its first name.
    """

    __slots__ = ("_borrowed", "_frozen", "_trainable", "_values", "module", "slots", "step", "vectors")

    def __init__(
        self,
        module: nn.Module,
        *,
        accumulate_dtype: torch.dtype | None = None,
        group_of: Callable[[str, nn.Parameter], int] | None = None,
        sort_of: Callable[[str, nn.Parameter], Sort] | None = None,
        parts: int = 1,
        uncut: bool = False,
    ) -> None:
        named = dict(module.named_parameters())
        self.module = module
        self.step = 0
        groups = {
            name: (group_of(name, p) if group_of else 0) if p.requires_grad else FROZEN for name, p in named.items()
        }
        kinds = {
            name: _Kind(p.dtype, p.device, p.requires_grad, sort_of(name, p) if sort_of else Sort())
            for name, p in named.items()
        }
        self.slots, lengths = _lay_out(named, groups, kinds, parts, uncut)
        self.vectors = tuple(_allocate(kind, length, accumulate_dtype) for kind, length in lengths.items())
        self._frozen = {name: parameter for name, parameter in named.items() if not parameter.requires_grad}
        self._borrowed: dict[str, Tensor] = {}  # values that are another layer's, by name
        trainable = []
        for slot in self.slots:
            parameter = named[slot.name]
            values, gradients, _ = self.vectors[slot.vector]
            _move(parameter, values, slot)
            if slot.group != FROZEN:
                path, _, key = slot.name.rpartition(".")
                owner = module.get_submodule(path)._parameters
                trainable.append(_Trainable(slot, parameter, *_attach(parameter, gradients, slot), owner, key))
        self._trainable = {id(entry.parameter): entry for entry in trainable}
        self._values = [(parameter, parameter.data) for parameter in named.values()]

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The stretch of each (vector, optimizer group), in that order; a frozen parameter is in none."""
        bounds: dict[tuple[int, int], tuple[int, int]] = {}
        for slot in self.slots:
            if slot.group != FROZEN:
                start, stop = bounds.get((slot.vector, slot.group), (slot.offset, slot.end))
                bounds[slot.vector, slot.group] = (min(start, slot.offset), max(stop, slot.end))
        return tuple(Segment(group, vector, *bound) for (vector, group), bound in sorted(bounds.items()))

    def zero_gradients(self) -> None:
        """Set every gradient that is there to 0, in place: a new step begins."""
        self.step += 1
        for vector in self.vectors:
            if vector.gradients.untyped_storage().nbytes():
                vector.gradients.zero_()

    def gradient_of(self, parameter: nn.Parameter) -> Tensor | None:
        """The view into which the gradient of a trainable parameter of this layer accumulates; None for others."""
        entry = self._trainable.get(id(parameter))
        return None if entry is None else entry.gradient

    def preset_of(self, parameter: nn.Parameter) -> Tensor:
        """The same memory as `gradient_of`, with a version counter that moves only when autograd adds."""
        return self._trainable[id(parameter)].preset

    def name_of(self, parameter: nn.Parameter) -> str:
        """The name of a trainable parameter in the layer."""
        return self._trainable[id(parameter)].slot.name

    def is_widened(self, parameter: nn.Parameter) -> bool:
        """Whether this trainable parameter's gradient is wider than the parameter and reaches its view by a hook."""
        return self._trainable[id(parameter)].widened

    def trainable(self) -> dict[str, nn.Parameter]:
        """The trainable parameters, by name."""
        return {entry.slot.name: entry.parameter for entry in self._trainable.values()}

    def gradients(self) -> dict[str, Tensor]:
        """The gradient view of every trainable parameter, by name."""
        return {entry.slot.name: entry.gradient for entry in self._trainable.values()}

    def borrow(self, name: str, values: Tensor) -> None:
        """Let a parameter have the values of another layer's, as tied weights do; its gradient stays its own."""
        parameter = self.module.get_parameter(name)
        parameter.data = self._borrowed[name] = values
        self._values = [(p, values if p is parameter else own) for p, own in self._values]

    def drop_unused(self) -> None:
        """Let go of the memory of vectors all of whose values are another layer's."""
        kept = {slot.vector for slot in self.slots if slot.name not in self._borrowed}
        for number, vector in enumerate(self.vectors):
            if number not in kept:
                vector.parameters.untyped_storage().resize_(0)

    def hide(self) -> None:
        """Let the parameters be all "not a number", in no memory, while their vector is not there: who looks at them
        sees that, and does not touch memory which is not there."""
        for parameter, values in self._values:
            nothing = float("nan") if values.is_floating_point() or values.is_complex() else 0
            parameter.data = values.new_full((), nothing).expand(values.shape)

    def show(self) -> None:
        """Undo ``hide``."""
        for parameter, values in self._values:
            parameter.data = values

    def release(self) -> None:
        """Let the module's parameters be plain ones again, where they are and with memory, but for who reads it soon:
        memory that was let go comes back with any contents."""
        self.show()
        for entry in self._trainable.values():
            entry.parameter.grad = None
            if entry.hook is not None:
                entry.hook.remove()
        for parameter, _ in self._values:  # which may lie in another layer's vector
            storage, end = parameter.untyped_storage(), int(parameter.storage_offset() + parameter.numel())
            if storage.nbytes() < end * parameter.itemsize:
                storage.resize_(end * parameter.itemsize)

    def attach_gradients(self) -> None:
        """Let autograd add into this layer's gradients, whatever `parameter.grad` was made between two steps."""
        for entry in self._trainable.values():
            wanted = None if entry.widened else entry.preset
            if entry.parameter.grad is not wanted:
                entry.parameter.grad = wanted

    def check_gradients(self) -> None:
        """Raise GradientError, naming the parameter, if it, its values or its gradient are not those of this layer."""
        for name, parameter in self._frozen.items():
            _check_still(name, parameter, trainable=False)
        for entry in self._trainable.values():
            grad = entry.parameter.grad
            _check_still(entry.slot.name, entry.parameter, trainable=True)
            if entry.owner.get(entry.key) is not entry.parameter:
                raise GradientError(
                    f"the parameter {entry.slot.name!r} was replaced by another object, which nothing trains. Build "
                    "layers in their final form, or change parameters in place (parameter.copy_(...) under no_grad)"
                )
            if grad is not entry.preset and not (entry.widened and grad is None):
                _check_gradient(entry, grad)
            self._check_values(entry)

    def _check_values(self, entry: _Trainable) -> None:
        name, values = entry.slot.name, entry.parameter
        if name in self._borrowed:
            place, offset = self._borrowed[name], self._borrowed[name].storage_offset()
        else:
            place, offset = self.vectors[entry.slot.vector].parameters, entry.slot.offset
        # Storages are compared, and not addresses: where parameters are gathered only while they are used, there are
        # none in between.
        moved = values.untyped_storage()._cdata != place.untyped_storage()._cdata or values.storage_offset() != offset
        if values.numel() and moved:
            raise GradientError(
                f"the values of {name!r} were replaced: they live in one vector per layer, which the "
                "optimizer steps on. Change them in place (parameter.copy_(...) under no_grad), not through .data ="
            )


def view_of(tensor: Tensor, shape: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    """A view of the tensor's storage, which may be without its memory for now: torch makes none of such a storage."""
    storage = tensor.untyped_storage()
    present = storage.nbytes()
    if not present:
        storage.resize_((offset + sum(d * (n - 1) for n, d in zip(shape, stride, strict=True)) + 1) * tensor.itemsize)
    view = tensor.as_strided(shape, stride, offset)
    if not present:
        storage.resize_(0)
    return view


class _Kind(NamedTuple):
    """What the parameters of one vector have in common."""

    dtype: torch.dtype
    device: torch.device
    trainable: bool
    sort: Sort


def _lay_out(
    named: Mapping[str, nn.Parameter],
    groups: Mapping[str, int],
    kinds: Mapping[str, _Kind],
    parts: int,
    uncut: bool,
) -> tuple[tuple[Slot, ...], dict[_Kind, int]]:
    """Slots in the module's order, and the length of the vector of each kind, in elements."""
    slots: dict[str, Slot] = {}
    lengths: dict[_Kind, int] = {}
    for vector, kind in enumerate(dict.fromkeys(kinds.values())):
        members = sorted((name for name in named if kinds[name] == kind), key=groups.__getitem__)
        step = ALIGNMENT // kind.dtype.itemsize
        sizes = {name: _up(named[name].numel(), step) for name in members}
        bins = _dealt(sizes, parts) if uncut else [members]
        length = max((sum(sizes[name] for name in names) for names in bins), default=0)
        for number, names in enumerate(bins):
            offset = number * length
            for name in names:
                parameter = named[name]
                slots[name] = Slot(name, parameter.shape, vector, offset, parameter.numel(), groups[name])
                offset += sizes[name]
        lengths[kind] = _up(length * len(bins), parts * step)
    return tuple(slots[name] for name in named), lengths


def _dealt(sizes: Mapping[str, int], parts: int) -> list[list[str]]:
    """Whole parameters dealt to parts that are as even as can be had by dealing the largest first, to the lightest."""
    dealt: list[list[str]] = [[] for _ in range(parts)]
    for name in sorted(sizes, key=sizes.__getitem__, reverse=True):
        min(dealt, key=lambda names: sum(sizes[n] for n in names)).append(name)
    return [[name for name in sizes if name in names] for names in dealt]


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


def _allocate(kind: _Kind, length: int, accumulate: torch.dtype | None) -> FlatVector:
    wide = torch.promote_types(kind.dtype, accumulate or torch.float32)
    return FlatVector(
        torch.zeros(length, dtype=kind.dtype, device=kind.device),
        torch.zeros(length if kind.trainable else 0, dtype=wide, device=kind.device),
        kind.sort,
    )


def _move(parameter: nn.Parameter, vector: Tensor, slot: Slot) -> None:
    view = vector[slot.offset : slot.end].view(slot.shape)
    with torch.no_grad():
        view.copy_(parameter)
    parameter.data = view


def _attach(parameter: nn.Parameter, vector: Tensor, slot: Slot) -> tuple[Tensor, Tensor, RemovableHandle | None]:
    """Let gradients accumulate in the vector; (view of it, the same for autograd, the hook that widens, if any)."""
    gradient = vector[slot.offset : slot.end].view(slot.shape)
    # Unlike a view or detach(), .data starts a version counter of its own.
    preset = gradient.data
    if gradient.dtype != parameter.dtype:
        parameter.grad = None
        return gradient, preset, parameter.register_post_accumulate_grad_hook(_Widen(preset))
    parameter.grad = preset
    return gradient, preset, None


@dataclass(frozen=True, slots=True, eq=False)
class _Widen:
    """Adds what autograd left in `parameter.grad` into the wider gradient, and drops it."""

    gradient: Tensor

    def __call__(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.gradient.add_(parameter.grad)
            parameter.grad = None


def _check_still(name: str, parameter: nn.Parameter, *, trainable: bool) -> None:
    if parameter.requires_grad is not trainable:
        was, became = ("trainable", "is frozen") if trainable else ("frozen", "is trainable")
        raise GradientError(
            f"the parameter {name!r} was {was} when the engine was made and {became} now; freeze and thaw parameters "
            "before, or save a checkpoint and go on from it with a new engine"
        )


def _check_gradient(entry: _Trainable, grad: Tensor | None) -> None:
    if grad is None or entry.widened or grad.data_ptr() != entry.preset.data_ptr():
        raise GradientError(
            f"the gradient of {entry.slot.name!r} was replaced ({_describe(grad)}): gradients live in one vector per "
            "layer, and one elsewhere would be lost. Change it in place (parameter.grad.mul_(...)), and leave zeroing "
            "to the engine instead of zero_grad(set_to_none=True)"
        )


def _describe(grad: Tensor | None) -> str:
    return "now None" if grad is None else f"now a {grad.dtype} tensor of shape {tuple(grad.shape)}"

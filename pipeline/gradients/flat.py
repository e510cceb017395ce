"""A layer's parameters and gradients as views of contiguous vectors, one pair of vectors for each dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipeline.errors import GradientError

ALIGNMENT = 64
"""Bytes to which the start of every parameter is padded: a cache line, and the width of the widest vector load."""

FROZEN = -1
"""The group of parameters that need no gradient; they stand behind the trainable ones in their vector."""


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


class FlatVector(NamedTuple):
    """All parameters of one dtype, and the gradients of the trainable ones, which stand first."""

    parameters: Tensor
    gradients: Tensor


class Segment(NamedTuple):
    """What one optimizer group owns of one vector: two 1-D views of equal length, padding (always 0) included."""

    group: int
    vector: int
    start: int
    stop: int
    parameters: Tensor
    gradients: Tensor


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
    widened: bool
    owner: Mapping[str, nn.Parameter | None]
    key: str


class FlatLayer:
    """Moves a module's parameters into contiguous vectors and gives it gradients that accumulate in place.

    Gradients have the wider of float32 and the parameter's dtype (or `accumulate_dtype`). Where that is the
    parameter's own dtype, `parameter.grad` is preset to a view of the gradient vector, and autograd adds
    into it; where it is wider, a hook adds what autograd brings into the view and drops it, and
    `parameter.grad` is None between backwards.

    `group_of(name, parameter)` numbers the optimizer groups from 0: the parameters of one group lie side by
    side. A parameter that the module holds under two names is one slot, under its first name.
    """

    __slots__ = ("_borrowed", "_frozen", "_trainable", "module", "slots", "step", "vectors")

    def __init__(
        self,
        module: nn.Module,
        *,
        accumulate_dtype: torch.dtype | None = None,
        group_of: Callable[[str, nn.Parameter], int] | None = None,
    ) -> None:
        named = dict(module.named_parameters())
        self.module = module
        self.step = 0
        self.slots, lengths = _lay_out(named, group_of or (lambda name, parameter: 0))
        self.vectors = tuple(_allocate(*length, accumulate_dtype) for length in lengths)
        self._frozen = {name: parameter for name, parameter in named.items() if not parameter.requires_grad}
        self._borrowed: dict[str, Tensor] = {}  # values that are another layer's, by name
        trainable = []
        for slot in self.slots:
            parameter = named[slot.name]
            values, gradients = self.vectors[slot.vector]
            _move(parameter, values, slot)
            if slot.group != FROZEN:
                path, _, key = slot.name.rpartition(".")
                owner = module.get_submodule(path)._parameters
                trainable.append(_Trainable(slot, parameter, *_attach(parameter, gradients, slot), owner, key))
        self._trainable = {id(entry.parameter): entry for entry in trainable}

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The stretch of each (vector, optimizer group), in that order; a frozen parameter is in none."""
        bounds: dict[tuple[int, int], tuple[int, int]] = {}
        for slot in self.slots:
            if slot.group != FROZEN:
                start, stop = bounds.get((slot.vector, slot.group), (slot.offset, slot.end))
                bounds[slot.vector, slot.group] = (min(start, slot.offset), max(stop, slot.end))
        segments = []
        for (vector, group), (start, stop) in sorted(bounds.items()):
            parameters, gradients = self.vectors[vector]
            segments.append(Segment(group, vector, start, stop, parameters[start:stop], gradients[start:stop]))
        return tuple(segments)

    def zero_gradients(self) -> None:
        """Set every gradient to 0, in place: a new step begins."""
        self.step += 1
        for vector in self.vectors:
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
        self.module.get_parameter(name).data = self._borrowed[name] = values

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
            expected = self._borrowed[name].data_ptr()
        else:
            whole = self.vectors[entry.slot.vector].parameters
            expected = whole.data_ptr() + entry.slot.offset * whole.element_size()
        if values.numel() and values.data_ptr() != expected:
            raise GradientError(
                f"the values of {name!r} were replaced: they live in one vector per layer, which the "
                "optimizer steps on. Change them in place (parameter.copy_(...) under no_grad), not through .data ="
            )


def share_storage(first: FlatLayer, second: FlatLayer) -> None:
    """Make `second`'s parameters views of `first`'s vectors, as tied weights are; gradients stay apart.

    Both must hold the same names, shapes, dtypes and groups. Later changes of one module's values are the
    other's.
    """
    if first.slots != second.slots or [v.parameters.dtype for v in first.vectors] != [
        v.parameters.dtype for v in second.vectors
    ]:
        raise GradientError(
            f"cannot tie {type(second.module).__name__} to {type(first.module).__name__}: parameters "
            f"{[(s.name, tuple(s.shape)) for s in second.slots]} against "
            f"{[(s.name, tuple(s.shape)) for s in first.slots]}. Build both from the same specification, frozen "
            "alike and in the same optimizer groups"
        )
    named = dict(second.module.named_parameters())
    for slot in second.slots:
        vector = first.vectors[slot.vector].parameters
        named[slot.name].data = vector[slot.offset : slot.end].view(slot.shape)
    second.vectors = tuple(
        FlatVector(mine.parameters, own.gradients) for mine, own in zip(first.vectors, second.vectors, strict=True)
    )


def _lay_out(
    named: dict[str, nn.Parameter], group_of: Callable[[str, nn.Parameter], int]
) -> tuple[tuple[Slot, ...], list[tuple[torch.dtype, torch.device, int, int]]]:
    """Slots in the module's order, and (dtype, device, trainable length, whole length) of each vector, in elements."""
    kinds = list(dict.fromkeys((p.dtype, p.device) for p in named.values()))
    groups = {
        name: group_of(name, parameter) if parameter.requires_grad else FROZEN for name, parameter in named.items()
    }
    slots: dict[str, Slot] = {}
    lengths = []
    for vector, (dtype, device) in enumerate(kinds):
        members = [name for name, p in named.items() if (p.dtype, p.device) == (dtype, device)]
        members.sort(key=lambda name: (groups[name] == FROZEN, groups[name]))
        step = ALIGNMENT // dtype.itemsize
        trainable = length = 0
        for name in members:
            parameter = named[name]
            slots[name] = Slot(name, parameter.shape, vector, length, parameter.numel(), groups[name])
            length += -(-parameter.numel() // step) * step
            trainable = trainable if groups[name] == FROZEN else length
        lengths.append((dtype, device, trainable, length))
    return tuple(slots[name] for name in named), lengths


def _allocate(
    dtype: torch.dtype, device: torch.device, trainable: int, length: int, accumulate: torch.dtype | None
) -> FlatVector:
    wide = torch.promote_types(dtype, accumulate or torch.float32)
    return FlatVector(
        torch.zeros(length, dtype=dtype, device=device), torch.zeros(trainable, dtype=wide, device=device)
    )


def _move(parameter: nn.Parameter, vector: Tensor, slot: Slot) -> None:
    view = vector[slot.offset : slot.end].view(slot.shape)
    with torch.no_grad():
        view.copy_(parameter)
    parameter.data = view


def _attach(parameter: nn.Parameter, vector: Tensor, slot: Slot) -> tuple[Tensor, Tensor, bool]:
    """Let gradients accumulate in the vector; (view of it, the same for autograd, whether a hook widens)."""
    gradient = vector[slot.offset : slot.end].view(slot.shape)
    # Unlike a view or detach(), .data starts a version counter of its own.
    preset = gradient.data
    widened = gradient.dtype != parameter.dtype
    if widened:
        parameter.grad = None
        parameter.register_post_accumulate_grad_hook(_Widen(preset))
    else:
        parameter.grad = preset
    return gradient, preset, widened


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

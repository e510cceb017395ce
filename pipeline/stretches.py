"""What the optimizer of a rank is handed: stretches of its parts of vectors, or whole parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from pipeline.gradients.flat import FROZEN, FlatLayer
from pipeline.ties import Held, Role
from pipeline.zero.shard import Shard

__all__ = ["Piece", "Stretch", "stretches"]


class Piece(NamedTuple):
    """Elements of a parameter, in the stretch from ``start`` to ``stop``, in the parameter from ``offset`` on."""

    name: str  # in the layer
    start: int
    stop: int
    offset: int
    numel: int  # of the whole parameter


class Stretch(NamedTuple):
    """Part of a layer that one optimizer group owns, as far as this rank holds it."""

    layer: int
    group: int
    role: Role
    parameters: Tensor
    gradients: Tensor
    pieces: tuple[Piece, ...]


def stretches(
    flats: Mapping[Held, FlatLayer], shards: Mapping[Held, tuple[Shard, ...]], *roles: Role, uncut: bool
) -> list[Stretch]:
    """What this rank holds of all parameters with one of these roles, in layer order.

    A stretch is 1-D and as long as the rank's part of the vector and the group in it allow; with ``uncut`` it is one
    parameter in its own shape (of one element where it has no dimension), and the layout has left it whole.
    """
    found = []
    for held, flat in flats.items():
        for vector, shard in enumerate(shards[held]):
            for group, start, stop in _bounds(flat, vector, shard, uncut):
                number, role = divmod(group, len(Role))
                if role in roles:
                    own = slice(start - shard.start, stop - shard.start)
                    pieces = _pieces(flat, vector, start, stop)
                    parameters, gradients = shard.trained[own], shard.gradients[own]
                    if uncut:
                        shape = next(s.shape for s in flat.slots if s.name == pieces[0].name) or (1,)
                        parameters, gradients = parameters.view(shape), gradients.view(shape)
                    found.append(Stretch(held.layer, number, Role(role), parameters, gradients, pieces))
    return found


def _bounds(flat: FlatLayer, vector: int, shard: Shard, uncut: bool) -> list[tuple[int, int, int]]:
    """(group, first element, one past the last) of the stretches of one vector that this rank holds."""
    slots = [s for s in flat.slots if s.vector == vector and s.group != FROZEN and s.numel]
    if uncut:
        return [(s.group, s.offset, s.end) for s in slots if shard.start <= s.offset and s.end <= shard.stop]
    found = [(e.group, max(e.start, shard.start), min(e.stop, shard.stop)) for e in flat.segments if e.vector == vector]
    return [bound for bound in found if bound[1] < bound[2]]


def _pieces(flat: FlatLayer, vector: int, start: int, stop: int) -> tuple[Piece, ...]:
    """The parameters of which a vector has elements between start and stop."""
    found = []
    for slot in flat.slots:
        first, last = max(start, slot.offset), min(stop, slot.end)
        if slot.vector == vector and first < last:
            found.append(Piece(slot.name, first - start, last - start, first - slot.offset, slot.numel))
    return tuple(found)

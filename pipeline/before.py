"""What a rank holds when its layout changes, and what of it the next layout can take on as it is."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pipeline.gradients.flat import FROZEN
from pipeline.gradients.split import unsplit
from pipeline.links.protocol import Group
from pipeline.module import Tie
from pipeline.ties import Held

if TYPE_CHECKING:
    from pipeline.build import BuiltLayers

__all__ = ["Before"]


@dataclass(frozen=True, slots=True)
class Before:
    """A rank's layers in the layout that is left; ``types`` are those that each layer of the model computes in, and
    ``trainable`` says of each parameter, by layer and name, whether it is."""

    built: BuiltLayers
    types: Sequence[torch.dtype | None] = ()
    trainable: Mapping[tuple[int, str], bool] = field(default_factory=dict)

    @staticmethod
    def leave(built: BuiltLayers, types: Sequence[torch.dtype | None], world: Group) -> Before:
        """What there is now, on all ranks.  Collective.

        Parameters are as trainable as they are on the rank that holds them: the layout is also left because some were
        frozen or thawed.
        """
        for flat in built.flats.values():
            flat.show()
        mine = {
            (held.layer, name): parameter.requires_grad
            for held, layer in built.layers.items()
            if layer.module is not None
            for name, parameter in layer.module.named_parameters()
        }
        told: list[dict[tuple[int, str], bool]] = world.all_gather_object(mine)
        return Before(built, types, {key: flag for rank in told for key, flag in rank.items()})

    def staying(
        self,
        places: Collection[Held],
        ties: Sequence[Tie],
        types: Sequence[torch.dtype | None],
        how: tuple[Any, ...],
    ) -> set[Held]:
        """The layers whose vectors the next layout, in which this rank holds ``places``, can keep as they are.

        Where parameters are tied, all uses on this rank share the vectors of the first: they stay together or not.
        """
        if how != self.built.how:
            return set()
        stays = {
            place
            for place in places
            if place in self.built.layers and types[place.layer] == self.types[place.layer] and self._unchanged(place)
        }
        groups = [{Held(use.layer, use.copy) for use in tie.uses} for tie in ties]
        before = set(stays) | {None}
        while before != stays:
            before = set(stays)
            for uses in groups:
                here, was = uses & set(places), uses & self.built.layers.keys()
                if here != was or not here <= stays:
                    stays -= uses
        return stays

    def _unchanged(self, place: Held) -> bool:
        """Whether each parameter of a layer is as trainable as when its vectors were made."""
        flat, module = self.built.flats.get(place), self.built.layers[place].module
        if flat is None or module is None:
            return True
        now = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
        return now == {slot.name: slot.group != FROZEN for slot in flat.slots}

    def release(self, places: Collection[Held]) -> None:
        """Make plain modules of layers again, whose values then count for nothing."""
        for place in places:
            layer = self.built.layers[place]
            if layer.binding is not None:
                unsplit(layer.binding)
            if layer.flat is not None:
                layer.flat.release()

    def fits(self, place: Held, dtype: torch.dtype | None) -> bool:
        """Whether the module of a layer can be one that computes in ``dtype``: what it was built in is not known."""
        return place in self.built.layers and (dtype is not None or self.types[place.layer] is None)

    def freeze(self, modules: Mapping[Held, nn.Module]) -> None:
        """Make parameters trainable, or not, as they were before on whichever rank had them."""
        for held, module in modules.items():
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(self.trainable.get((held.layer, name), parameter.requires_grad))

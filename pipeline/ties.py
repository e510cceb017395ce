"""Tied weights, twins among them: every use has a gradient of its own, and they are added in one order everywhere."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from enum import IntEnum
from itertools import permutations
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipeline.errors import ModelError
from pipeline.gradients.flat import FlatLayer
from pipeline.links.protocol import LANE_CONTROL, Link
from pipeline.module import PipelineModule, Tie, Use
from pipeline.zero.shard import Shard

__all__ = ["Held", "Role", "TiedGradients", "owner_name", "role", "separate", "share", "tie_of", "with_twins"]


class Held(NamedTuple):
    """A layer as a rank holds it: its index in the list, and which copy, 0 but where a schedule keeps two."""

    layer: int
    copy: int = 0


def with_twins(module: PipelineModule, copies: int) -> tuple[Tie, ...]:
    """The ties of a model of which a schedule keeps so many copies: every parameter is tied to itself in the others.

    Uses stand in layer order, those of one layer in the order of copies.  Ties of one copy are the model's own.
    """
    own = module.ties()
    if copies == 1:
        return own
    ties = [Tie(tie.name, tuple(use._replace(copy=c) for use in tie.uses for c in range(copies))) for tie in own]
    for layer, entry in enumerate(module.entries):
        tied = {use.parameter for tie in own for use in tie.uses if use.layer == layer}
        if None in tied:
            continue
        names: list[str | None] = [None]
        if tied and isinstance(entry, nn.Module):  # the rest of a layer that shares some of its parameters
            names = [name for name, _ in entry.named_parameters() if name not in tied]
        for name in names:
            uses = tuple(Use(layer, name, number) for number in range(copies))
            ties.append(Tie(f"layers.{layer}" if name is None else f"layers.{layer}.{name}", uses))
    return tuple(ties)


class Role(IntEnum):
    """What a parameter of a layer is on this rank.

    OWNER: not tied, or the first use of all: it is counted in norms and saved.  COPY: the first use on this rank of
    a parameter whose first use is elsewhere: it has optimizer state and stays bit-equal to the owner.  ALIAS: a later
    use on the same rank: it shares the storage of the rank's first.
    """

    OWNER = 0
    COPY = 1
    ALIAS = 2


def role(ties: Sequence[Tie], local: Mapping[Held, object], held: Held, parameter: str) -> Role:
    """The role of one parameter on a rank that holds the layers ``local``."""
    for tie in ties:
        if _uses(tie, held.layer, parameter):
            if _held(tie.uses[0]) == held:
                return Role.OWNER
            first_here = next(use for use in tie.uses if _held(use) in local)
            return Role.COPY if _held(first_here) == held else Role.ALIAS
    return Role.OWNER


def _held(use: Use) -> Held:
    return Held(use.layer, use.copy)


def owner_name(ties: Sequence[Tie], layer: int, parameter: str) -> str:
    """The name under which a parameter is saved: that of its first use in the layer list."""
    for tie in ties:
        if _uses(tie, layer, parameter):
            first = tie.uses[0]
            return f"layers.{first.layer}.{first.parameter or parameter}"
    return f"layers.{layer}.{parameter}"


def tie_of(ties: Sequence[Tie], layer: int, parameter: str) -> str:
    """The name of the tie that a parameter is in, nothing where it is in none."""
    return next((tie.name for tie in ties if _uses(tie, layer, parameter)), "")


def _uses(tie: Tie, layer: int, parameter: str) -> bool:
    return any(use.layer == layer and use.parameter in (None, parameter) for use in tie.uses)


def separate(modules: Mapping[Held, nn.Module]) -> dict[Held, nn.Module]:
    """The modules, each layer's with children and Parameter objects of its own where different layers held the same;
    the first of them keeps these."""
    children: set[int] = set()
    parameters: dict[int, Held] = {}
    separated = {}
    for held, module in modules.items():
        shares = any(id(child) in children for child in module.modules())
        separated[held] = own = copy.deepcopy(module) if shares else module
        children.update(map(id, module.modules()))
        for child in own.modules():
            for name, parameter in child._parameters.items():
                if parameter is not None and parameters.setdefault(id(parameter), held) != held:
                    setattr(child, name, nn.Parameter(parameter.detach().clone(), parameter.requires_grad))
    return separated


def share(ties: Sequence[Tie], flats: Mapping[Held, FlatLayer]) -> None:
    """Let all uses of a parameter on this rank see one storage, that of the first.

    Raises ``ModelError`` when uses of one key differ in the names or shapes of their parameters.
    """
    for tie in ties:
        local = [use for use in tie.uses if _held(use) in flats]
        for use in local[1:]:
            first, other = _parameters(local[0], flats), _parameters(use, flats)
            shapes = [[tuple(p.shape) for p in parameters.values()] for parameters in (first, other)]
            if shapes[0] != shapes[1]:
                raise ModelError(
                    f"layers {local[0].layer} and {use.layer} are tied as {tie.name!r}, but their parameters have "
                    f"shapes {shapes[0]} and {shapes[1]}; build all uses of a key with the same class and arguments"
                )
            for mine, name in zip(first.values(), other, strict=True):
                flats[_held(use)].borrow(name, mine.data)
            flats[_held(use)].drop_unused()


def _parameters(use: Use, flats: Mapping[Held, FlatLayer]) -> dict[str, nn.Parameter]:
    named = dict(flats[_held(use)].module.named_parameters())
    return named if use.parameter is None else {use.parameter: named[use.parameter]}


class TiedGradients:
    """Adds the gradients of all uses of each tied parameter, the same way on every rank that holds one.

    ``rank_of_layer`` are ranks of the link, of every copy of every layer.  Nothing is summed by a collective: its order
    would depend on the layout.
    """

    def __init__(
        self,
        ties: Sequence[Tie],
        shards: Mapping[Held, Sequence[Shard]],
        rank_of_layer: Mapping[Held, int],
        link: Link,
    ) -> None:
        self._link = link
        self._all = ties
        self._rank_of_layer = rank_of_layer
        self._ties = []
        for tie in ties:
            local = {
                use: [s for s in shards[_held(use)] if s.vector.sort.tie == tie.name and s.gradients.numel()]
                for use in tie.uses
                if _held(use) in shards
            }
            if any(local.values()):
                self._ties.append((tie, local))

    @property
    def pairs(self) -> set[tuple[int, int]]:
        """The ranks, of those that ``rank_of_layer`` names, that send each other gradients."""
        holders = [{self._rank_of_layer[_held(use)] for use in tie.uses} for tie in self._all]
        return {pair for ranks in holders for pair in permutations(sorted(ranks), 2)}

    def add(self) -> None:
        """Collective over the ranks that hold uses; afterwards each rank's first use holds the sum."""
        for tie, local in self._ties:
            terms = self._terms(tie, local)
            total = terms[0].clone()
            for term in terms[1:]:
                total += term
            first = next(iter(local.values()))
            for shard, part in zip(first, total.split([s.gradients.numel() for s in first]), strict=True):
                shard.gradients.copy_(part)

    def _terms(self, tie: Tie, local: Mapping[Use, list[Shard]]) -> list[Tensor]:
        """The gradient of every use as a vector, in the order of uses; those of other ranks are exchanged."""
        here = self._link.rank
        vectors = {use: torch.cat([s.gradients for s in shards]) for use, shards in local.items()}
        like = next(iter(vectors.values()))
        others = sorted({self._rank_of_layer[_held(use)] for use in tie.uses} - {here})
        sends = [self._link.send(peer, vector, LANE_CONTROL) for peer in others for vector in vectors.values()]
        receives = []
        for use in tie.uses:
            if use not in vectors:
                vectors[use] = torch.empty_like(like)
                receives.append(self._link.receive(self._rank_of_layer[_held(use)], vectors[use], LANE_CONTROL))
        for pending in (*receives, *sends):
            pending.wait()
        return [vectors[use] for use in tie.uses]

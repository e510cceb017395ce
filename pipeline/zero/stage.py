"""The vectors of a stage's layers: made whole layer by layer while a pass needs them, and reduced behind it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.layer import Layer
from pipeline.zero.shard import Shard
from schedules import Kind

__all__ = ["Exchanged", "LayerShards", "StageShards"]


class Exchanged(NamedTuple):
    """What replicas of a stage have done together beside their passes, from ``start`` to ``end`` by
    ``time.perf_counter``."""

    what: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class LayerShards:
    """A layer with its vectors.

    ``used`` are those that its parameters lie in, which may be another layer's where they are tied; its gradients are
    added up in its own, in those of ``matrices`` by W if the backward is split, in the ``others`` by I.
    """

    layer: Layer
    used: tuple[Shard, ...]
    matrices: tuple[Shard, ...]
    others: tuple[Shard, ...]

    def added_by(self, kind: Kind) -> tuple[Shard, ...]:
        """The vectors that are complete behind a pass of this kind, of one micro-batch."""
        return self.others if kind is Kind.I else self.matrices if kind is Kind.W else self.matrices + self.others

    @property
    def all_deferred(self) -> bool:
        """Whether I has added nothing to matrices, as far as what it has just done shows."""
        return self.layer.binding is not None and self.layer.binding.defers_all()


class StageShards:
    """What a stage does together with the same stage of other pipelines.

    Collectives run in the order of the program and, inside of a pass, of its layers, the same on every replica; those
    of a pass that is not run to its end, because the step has failed on this rank, ``make_up`` runs.

    ``in_parts``: ranks hold parts of something, so that passes have to ask for the whole.  ``stay``: parameters are
    gathered all together, and stay.  Else a pass gathers layer by layer, ``ahead`` of the one it is at, and lets each
    go.  ``bucketed``: gradients are reduced behind every layer of every pass, and not once.
    """

    def __init__(
        self, layers: Sequence[LayerShards], *, in_parts: bool, stay: bool, ahead: int, bucketed: bool
    ) -> None:
        self.in_parts = in_parts
        self._layers = tuple(layers)
        self._behind = tuple(reversed(self._layers))
        self._stay = self._staying = stay
        self._ahead = ahead
        self._bucketed = bucketed
        self._order: Sequence[LayerShards] = ()
        self._gathered = 0  # in this order
        self._under_way: Iterator[Layer] | None = None
        self._gathers_since = self._reduces_since = 0.0
        self.exchanged: list[Exchanged] = []
        """What went on beside passes since this was last cleared."""

    # -- what the program says -------------------------------------------------------------------------------

    def unshard(self, before: Set[Kind]) -> None:
        """Start to gather for the pass that follows, forward or backward; for both at once everything stays."""
        self._order = self._layers if Kind.F in before else self._behind
        self._staying = self._stay or len(before) > 1
        self._gathered = 0
        self._gathers_since = time.perf_counter() if self._staying else 0.0
        self._gather(len(self._order) if self._staying else 1 + self._ahead)

    def reshard(self) -> None:
        """Let go of parameters that have stayed."""
        if self._staying:
            for layer in self._order:
                for shard in layer.used:
                    shard.ready()
            self._note_gathers()
            for layer in self._order:
                for shard in layer.used:
                    shard.release()
        self._order = ()

    def reduce(self) -> None:
        """Start to sum all gradients, unless passes have done that."""
        if not self._bucketed:
            self._reduces_since = time.perf_counter()
            for layer in self._layers:
                for shard in layer.matrices + layer.others:
                    shard.reduce()

    def settle(self) -> None:
        """Wait for all that has been started."""
        for layer in self._layers:
            for shard in layer.used:
                shard.ready()
            for shard in layer.matrices + layer.others:
                shard.reduced()
        self._note_gathers()
        if self._reduces_since:
            ends = [s.summed_at for layer in self._layers for s in layer.matrices + layer.others]
            self._note("REDUCE_GRAD", self._reduces_since, ends)
            self._reduces_since = 0.0

    def _note_gathers(self) -> None:
        if self._gathers_since:
            ends = [shard.arrived_at for layer in self._layers for shard in layer.used]
            self._note("UNSHARD", self._gathers_since, ends)
            self._gathers_since = 0.0

    def _note(self, what: str, since: float, ends: Sequence[float]) -> None:
        last = max(ends, default=0.0)
        if last > since:
            self.exchanged.append(Exchanged(what, since, last))

    # -- what a pass does ------------------------------------------------------------------------------------

    def forward(self) -> Iterator[Layer]:
        """The layers in order, each with its parameters whole."""
        return self._begin(Kind.F)

    def backward(self, *, defer: bool) -> Iterator[Layer]:
        """The layers from the last to the first, each with parameters and gradients whole; with ``defer`` the products
        of weights are still to come."""
        return self._begin(Kind.I if defer else Kind.B)

    def weights(self) -> Iterator[Layer]:
        """The layers from the last to the first, each with the gradients of matrices whole."""
        return self._begin(Kind.W)

    def make_up(self, kind: Kind) -> None:
        """Do the rest of a pass without its layers, or all of it."""
        for _ in self._under_way or self._begin(kind):
            pass

    def _begin(self, kind: Kind) -> Iterator[Layer]:
        self._under_way = self._weights() if kind is Kind.W else self._forward() if kind is Kind.F else self._back(kind)
        return self._under_way

    def _forward(self) -> Iterator[Layer]:
        for place, layer in enumerate(self._layers):
            self._enter(place, layer)
            yield layer.layer
            self._leave(layer)
        self._under_way = None

    def _back(self, kind: Kind) -> Iterator[Layer]:
        for place, layer in enumerate(self._behind):
            self._enter(place, layer)
            for shard in layer.matrices + layer.others:
                shard.open()
            yield layer.layer
            self._leave(layer)
            self._reduce(layer, kind)
            if kind is Kind.I and self._bucketed and layer.all_deferred:
                for shard in layer.matrices:
                    shard.drop_gradients()
        self._under_way = None

    def _weights(self) -> Iterator[Layer]:
        for layer in self._behind:
            for shard in layer.matrices:
                shard.open()
            yield layer.layer
            self._reduce(layer, Kind.W)
        self._under_way = None

    def _enter(self, place: int, layer: LayerShards) -> None:
        self._gather(place + 1 + self._ahead)
        for shard in layer.used:
            shard.ready()

    def _leave(self, layer: LayerShards) -> None:
        if not self._staying:
            for shard in layer.used:
                shard.release()

    def _gather(self, count: int) -> None:
        while self._gathered < min(count, len(self._order)):
            for shard in self._order[self._gathered].used:
                shard.gather()
            self._gathered += 1

    def _reduce(self, layer: LayerShards, behind: Kind) -> None:
        if self._bucketed:
            for shard in layer.added_by(behind):
                shard.reduce()
            for shard in layer.added_by(behind):
                shard.reduced()

"""Which rank holds which stage, and along which stages a micro-batch travels."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Placement(NamedTuple):
    """Where the stages are; the fields mean what they mean in ``Schedule``."""

    rank_of_stage: tuple[int, ...]
    routes: tuple[tuple[int, ...], ...]
    layer_group_of_stage: tuple[int, ...]

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank in increasing order."""
        return tuple(stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank)


class PlacementRule(Protocol):
    """A function that places stages; its name is what facts and tables call the placement."""

    @property
    def __name__(self) -> str: ...

    def __call__(self, ranks: int, stages_per_rank: int) -> Placement: ...


def line(ranks: int, stages_per_rank: int) -> Placement:
    """One stage a rank: 0 1 2 3."""
    return loop(ranks, stages_per_rank)


def loop(ranks: int, stages_per_rank: int) -> Placement:
    """Stage s on rank s mod ranks: 0 1 2 3 0 1 2 3, the last rank hands on to the first."""
    stages = tuple(range(ranks * stages_per_rank))
    return Placement(tuple(stage % ranks for stage in stages), (stages,), stages)


def wave(ranks: int, stages_per_rank: int) -> Placement:
    """Back and forth: 0 1 2 3 3 2 1 0, so that stages that follow each other at a turn share a rank."""
    forth = tuple(range(ranks))
    stages = tuple(range(ranks * stages_per_rank))
    return Placement(tuple((forth, forth[::-1])[s // ranks % 2][s % ranks] for s in stages), (stages,), stages)


def both_ways(ranks: int, stages_per_rank: int) -> Placement:
    """Two copies of every stage: a micro-batch enters at the first rank or at the last.

    Stages 0 to p - 1 are on ranks 0 to p - 1, their twins p to 2 p - 1 on ranks p - 1 to 0.
    """
    there, back = tuple(range(ranks)), tuple(range(ranks, 2 * ranks))
    return Placement(there + there[::-1], (there, back), there + there)

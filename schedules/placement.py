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

"""How often a stage exchanges parameters and gradients with the same stage of other pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from schedules.action import Action, Kind, Pair, actions_of


class Sharing(NamedTuple):
    """``gather``: parameters are whole all the time (never), are made whole once a step, or for a pass; then a stage in
    ``stays`` stays whole as long as its rank's passes are all its own.  ``reduce``: gradients are summed once a step,
    behind the last pass that adds to them, or behind each: behind an I what it does not leave to W."""

    gather: Literal["never", "step", "pass"] = "never"
    reduce: Literal["step", "pass"] = "step"
    stays: frozenset[int] = frozenset()


ALONE = Sharing()


def gathers(row: tuple[Action | Pair, ...], sharing: Sharing) -> Iterator[tuple[int, int, bool]]:
    """(entry of the row, stage, whether to gather before it or let go behind it) for stages gathered for a pass.

    A W needs no parameters, so that it neither asks for them nor stands in the way of those that stay.
    """
    using = [
        (place, {action.stage for action in actions_of(entry) if action.kind is not Kind.W})
        for place, entry in enumerate(row)
    ]
    using = [(place, stages) for place, stages in using if stages]
    whole: set[int] = set()
    for (place, stages), (_, following) in zip(using, [*using[1:], (0, set())], strict=True):
        for stage in sorted(stages - whole):
            yield place, stage, True
        whole = stages & following & sharing.stays
        for stage in sorted(stages - whole):
            yield place, stage, False

"""When each action of a step ran: stamps taken by the executor, gathered into a measured Timeline."""

from __future__ import annotations

from typing import NamedTuple

from pipeline.links.protocol import Group
from pipeline.zero.stage import Exchanged
from schedules import Schedule, Timeline
from schedules.timeline import Span

__all__ = ["RankStamps", "Stamps", "measured_timeline"]


class Stamps:
    """Start and end of each entry of a rank's row, in seconds of the host's monotonic clock; reused every step."""

    __slots__ = ("begin", "beside", "end", "ends", "starts")

    def __init__(self, entries: int) -> None:
        self.starts = [0.0] * entries
        self.ends = [0.0] * entries
        self.begin = self.end = 0.0
        self.beside: list[Exchanged] = []
        """What went on beside the row."""

    @property
    def busy(self) -> float:
        """Seconds spent computing."""
        return sum(self.ends) - sum(self.starts)


class RankStamps(NamedTuple):
    """A copy of one rank's stamps, as it travels."""

    starts: tuple[float, ...]
    ends: tuple[float, ...]
    beside: tuple[Exchanged, ...]


def measured_timeline(schedule: Schedule, stamps: Stamps, pipeline: Group, *, hop: float) -> Timeline:
    """The Timeline of the last step, on every rank of the pipeline.  Collective over the pipeline's ranks."""
    gathered = pipeline.all_gather_object(RankStamps(tuple(stamps.starts), tuple(stamps.ends), tuple(stamps.beside)))
    origin = min((rank.starts[0] for rank in gathered if rank.starts), default=0.0)
    starts = [[t - origin for t in rank.starts] for rank in gathered]
    ends = [[t - origin for t in rank.ends] for rank in gathered]
    beside = [
        Span(place, "reduce", what, start - origin, end - origin)
        for place, rank in enumerate(gathered)
        for what, start, end in rank.beside
    ]
    return Timeline.measured(schedule, starts, ends, other=beside, hop=hop)

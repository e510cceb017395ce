"""Layouts of a training run: everything that must not change its result, and which of them there are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

from schedules import Schedule, build, facts, names
from schedules.errors import ScheduleError


@dataclass(frozen=True)
class Layout:
    """Everything about a run that must not change its result, and the number of micro-batches."""

    schedule: str = "1f1b"
    ranks: int = 1
    stages_per_rank: int = 1
    micro_batches: int = 4
    data_parallel: int = 1
    partition: str | tuple[int, ...] = "uniform"
    recompute: str | tuple[int, ...] = "none"
    receive_ahead: int = 2
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        numbers = [self.schedule, f"{self.ranks} ranks", f"{self.stages_per_rank} stages", f"{self.micro_batches} mb"]
        changed = [f for f in fields(self)[4:] if getattr(self, f.name) != getattr(Layout(), f.name)]
        return ", ".join(numbers + [f"{f.name} {getattr(self, f.name)}" for f in changed])

    def settings(self, **others: Any) -> dict[str, Any]:
        """The settings of an engine of this layout."""
        return {
            "schedule": self.schedule,
            "schedule_options": dict(self.options),
            "stages_per_rank": self.stages_per_rank,
            "micro_batches": self.micro_batches,
            "data_parallel": self.data_parallel,
            "partition": self.partition,
            "recompute": self.recompute,
            "receive_ahead": self.receive_ahead,
            "device": "cpu",
            "timeout": 30.0,
            **others,
        }

    def build(self) -> Schedule:
        """The schedule of a whole step."""
        return build(
            self.schedule,
            ranks=self.ranks // self.data_parallel,
            micro_batches=self.micro_batches,
            stages_per_rank=self.stages_per_rank,
            **dict(self.options),
        )

    @property
    def exact(self) -> bool:
        """Whether the schedule promises the same bits as every other one that does."""
        made = self.build()
        return made.ordered and len(made.routes) == 1


def training_schedules() -> list[str]:
    """The names of all schedules that have backwards."""
    return [name for name in names() if not _some_shape(name).forward_only]


def _some_shape(name: str) -> Schedule:
    for ranks, number in product((2, 4), (8, 16)):
        try:
            return build(name, ranks=ranks, micro_batches=number)
        except ScheduleError:
            continue
    raise LookupError(f"{name} runs neither on 2 nor on 4 ranks")


def layouts(
    ranks: Sequence[int], stages_per_rank: Sequence[int], numbers: Sequence[int], schedules: Sequence[str] = ()
) -> Iterator[Layout]:
    """Every layout that the schedules declare possible, of all training schedules unless some are named."""
    for name in schedules or training_schedules():
        known = facts(name)
        for p, v, m in product(ranks, stages_per_rank, numbers):
            if known.stages_per_rank.allow(v) and known.ranks.allow(p, v, m) and known.micro_batches.allow(p, v, m):
                yield Layout(name, p, v, m)

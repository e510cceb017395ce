"""The timeline: when everything started and ended, predicted or measured, in one and the same type."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedules.costs import Costs
from schedules.errors import CostError, StampError
from schedules.schedule import Schedule
from schedules.table import KIND, STAGE, B, F, I, W

if TYPE_CHECKING:
    from schedules.causes import Bubble, Gaps
    from schedules.difference import Difference

Seconds = NDArray[np.float64]

BUSY = ("compute", "step")
"""The tracks on which a rank itself works; the others are transfers that go on beside it."""


class Span(NamedTuple):
    """Something with a start and an end, in seconds from the start of the step."""

    rank: int
    track: str  # "compute", "reduce", "step" or "link"
    action: str
    start: float
    end: float


@dataclass(frozen=True, eq=False)
class Timeline:
    """One step. The arrays of a rank are aligned with ``schedule.rows[rank]``; time 0 is the step's start.

    Not slotted, because idle causes and the like are computed on first use and kept.
    """

    schedule: Schedule
    kind: Literal["predicted", "measured"]
    start: tuple[Seconds, ...] = field(repr=False)
    end: tuple[Seconds, ...] = field(repr=False)
    other: tuple[Span, ...] = field(default=(), repr=False)
    """Spans on tracks beside compute."""
    hop: float = 0.0
    """How long a message travels between two ranks; what a wait exceeds it by is not the link's fault."""
    costs: Costs | None = field(default=None, repr=False)
    """What it was predicted for."""
    travel: Seconds | None = field(default=None, repr=False)
    """How long the messages to each entry travelled, shape as ``schedule.senders``; None: all of them one hop."""
    whole: Seconds | None = field(default=None, repr=False)
    """When the parameters of each entry were whole, shape (entries,); None: always."""

    @staticmethod
    def measured(
        schedule: Schedule,
        starts: Sequence[Sequence[float] | Seconds],
        ends: Sequence[Sequence[float] | Seconds],
        *,
        other: Sequence[Span] = (),
        hop: float = 0.0,
    ) -> Timeline:
        """A timeline of stamps: ``starts[r][i]`` and ``ends[r][i]`` are entry i of ``schedule.rows[r]``.

        Seconds from the common start of the step; ``hop`` is the link's measured latency. Raises StampError
        when the stamps do not match the rows.
        """
        lengths = np.diff(schedule.entries.starts).tolist()
        for what, stamps in (("starts", starts), ("ends", ends)):
            given = [len(row) for row in stamps]
            if given != lengths:
                raise StampError(f"{what} has {given} stamps a rank, the rows have {lengths} entries")
        return Timeline(schedule, "measured", _frozen(starts), _frozen(ends), tuple(other), hop)

    # How long, how busy.

    @cached_property
    def step_time(self) -> float:
        """Seconds from the start of the step to the end of whatever ends last."""
        ends = [float(end.max(initial=0.0)) for end in self.end]
        return max([*ends, *(span.end for span in self.other)], default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds each rank works: its passes, and its optimizer step where there is one."""
        seconds = [float((end - start).sum()) for start, end in zip(self.start, self.end, strict=True)]
        for span in self.other:
            if span.track in BUSY:
                seconds[span.rank] += span.end - span.start
        return tuple(seconds)

    @property
    def idle(self) -> tuple[float, ...]:
        """The fraction of the step each rank does not work."""
        return tuple(1 - busy / self.step_time if self.step_time else 0.0 for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The mean of ``idle``: 1 - busy / (ranks x step time). Right when a step ends in a barrier."""
        return float(np.mean(self.idle)) if self.idle else 0.0

    @property
    def span_bubble(self) -> float:
        """The same over the longest span of a rank, from its own first start to its own last end.

        The measure of the zero-bubble papers (arXiv 2401.10241, section 5.3), which let ranks begin the next
        step one after the other.
        """
        rows = [(start, end) for start, end in zip(self.start, self.end, strict=True) if len(start)]
        longest = max((float(end[-1] - start[0]) for start, end in rows), default=0.0)
        work = sum(float((end - start).sum()) for start, end in rows)
        return 1 - work / (self.schedule.ranks * longest) if longest else 0.0

    # How much better it could be.

    @cached_property
    def bound(self) -> float:
        """The time that no order of these passes on this placement can be shorter than; see ``schedules.bound``."""
        from schedules.bound import bound_of

        return bound_of(self)

    @property
    def gap(self) -> float:
        """How far the step is above ``bound``, as a part of it."""
        return self.step_time / self.bound - 1 if self.bound else 0.0

    # Memory, in micro-batches of a rank's whole share of the model or in bytes.

    @cached_property
    def peak_activations(self) -> tuple[float, ...]:
        """The most micro-batches a rank holds; one on one of v stages counts 1/v until its W or B ends.

        Where ``costs.kept`` says so, a part of it is freed with I."""
        return tuple(float(live.max(initial=0.0)) for _, live in map(self.memory, range(self.schedule.ranks)))

    @cached_property
    def peak_bytes(self) -> tuple[float, ...]:
        """The most bytes of activations a rank holds. Raises CostError where no bytes are known."""
        return tuple(float(live.max(initial=0.0)) for _, live in map(self.memory_bytes, range(self.schedule.ranks)))

    def memory(self, rank: int) -> tuple[Seconds, NDArray[np.float64]]:
        """Live activations over time as steps: ``live[i]`` from ``times[i]`` until ``times[i + 1]``."""
        return self._over_time(rank, *self._changes)

    def memory_bytes(self, rank: int) -> tuple[Seconds, NDArray[np.float64]]:
        """The same in bytes, of which a part is let go when I ends and the rest when W ends.

        Raises CostError where no bytes are known, as in a measured timeline.
        """
        return self._over_time(rank, *self._byte_changes)

    def _over_time(self, rank: int, taken: Seconds, freed: Seconds) -> tuple[Seconds, NDArray[np.float64]]:
        entries = slice(*self.schedule.entries.starts[rank : rank + 2])
        times = np.stack([self.start[rank], self.end[rank]], axis=1).ravel()
        live = np.cumsum(np.stack([taken[entries], -freed[entries]], axis=1).ravel())
        return np.concatenate([[0.0], times]), np.concatenate([[0.0], live])

    @property
    def _stage_share(self) -> float:
        """What one stage is of a rank's share of the model; two copies of a stage are two whole stages."""
        return self.schedule.ranks / max(self.schedule.num_layer_groups, 1)

    @cached_property
    def _changes(self) -> tuple[Seconds, Seconds]:
        """Activations taken at the start and freed at the end of every entry, in shares of a rank."""
        stage, kind = self.schedule.actions[:, STAGE], self.schedule.actions[:, KIND]
        kept = 1.0 if self.costs is None else self.costs.per_stage("kept", self.schedule.num_stages)[stage]
        # Without a backward nothing outlives its own forward.
        ends = (kind == F) if self.schedule.forward_only else kind == B
        frees = np.where(kind == I, 1 - kept, np.where(kind == W, kept, ends))
        return self._by_entry((kind == F) * self._stage_share), self._by_entry(frees * self._stage_share)

    @cached_property
    def _byte_changes(self) -> tuple[Seconds, Seconds]:
        """The same in bytes."""
        if self.costs is None:
            raise CostError("this timeline knows no bytes: predict it with activation_bytes and weight_grad_bytes")
        stage, kind = self.schedule.actions[:, STAGE], self.schedule.actions[:, KIND]
        kept = self.costs.per_stage("activation_bytes", self.schedule.num_stages)[stage]
        queued = self.costs.per_stage("weight_grad_bytes", self.schedule.num_stages)[stage]
        if self.schedule.forward_only:
            return self._by_entry(kept), self._by_entry(kept)
        freed = np.select([kind == B, kind == I, kind == W], [kept, kept - queued, queued])
        return self._by_entry(np.where(kind == F, kept, 0.0)), self._by_entry(freed)

    def _by_entry(self, amounts: Seconds) -> Seconds:
        """What the actions of each entry amount to together."""
        entries = self.schedule.entries
        return np.bincount(entries.of_action, amounts, len(entries.rank)).astype(np.float64)

    # Why.

    @cached_property
    def gaps(self) -> Gaps:
        """Every idle stretch in arrays; see ``schedules.causes``."""
        from schedules.causes import find_gaps

        return find_gaps(self)

    @cached_property
    def bubbles(self) -> tuple[Bubble, ...]:
        """Every idle stretch of every rank with its one cause, in order of rank and time."""
        from schedules.causes import bubbles

        return bubbles(self)

    @cached_property
    def idle_by_cause(self) -> tuple[Mapping[str, float], ...]:
        """For each rank the fraction of the step lost to each cause; they sum to its ``idle``."""
        from schedules.causes import idle_by_cause

        return idle_by_cause(self)

    @cached_property
    def critical_path(self) -> tuple[Span, ...]:
        """The chain of passes that decides the step time: while none of them is shorter, nor is the step."""
        from schedules.causes import critical_path

        return critical_path(self)

    def difference(self, other: Timeline) -> Difference:
        """What changes from this timeline to ``other``; its ``text()`` says it in words."""
        from schedules.difference import Difference

        return Difference(self, other)

    # What it looks like.

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """All spans: the compute track rank after rank, then the other tracks."""
        compute = (
            Span(rank, "compute", str(entry), start, end)
            for rank, row in enumerate(self.schedule.rows)
            for entry, start, end in zip(row, self.start[rank].tolist(), self.end[rank].tolist(), strict=True)
        )
        return (*compute, *self.other)

    def span(self, entry: int) -> Span:
        """The compute span of an entry, by its number in ``schedule.entries``."""
        rank = int(self.schedule.entries.rank[entry])
        place = entry - int(self.schedule.entries.starts[rank])
        start, end = float(self.start[rank][place]), float(self.end[rank][place])
        return Span(rank, "compute", self.schedule.entry_text(entry), start, end)

    def save(self, path: str | os.PathLike[str], *, over: Timeline | Sequence[Timeline] = (), unit: str = "s") -> None:
        """Write a picture (.png, .svg), a page (.html) or a trace for Perfetto (.json).

        ``over``: a timeline, or several, drawn below this one on the same time axis. ``unit``: "s" writes
        times as seconds; "" writes plain numbers, for costs that are only relative. The file appears whole or
        not at all. Raises UnknownFormat for any other ending, MissingLibrary where .png or .svg lack
        matplotlib.
        """
        from schedules.saving import save

        save(self, path, over=over, unit=unit)


def _frozen(rows: Sequence[Sequence[float] | Seconds]) -> tuple[Seconds, ...]:
    arrays = tuple(np.array(row, dtype=np.float64) for row in rows)
    for array in arrays:
        array.setflags(write=False)
    return arrays

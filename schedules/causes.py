"""Why a rank is idle: every idle stretch of a timeline is traced back along what it waited for.

A rank that is idle waits for a message, or for the end of the step. The message was made by a pass of another
rank, which had waited for its rank or for a message, and so on. That chain covers the idle stretch without a
hole, and each of its pieces says why:

    a message under way                         link
    parameters that are not yet whole           reduction
    a pass that could have begun and had not    host: what the runtime costs, in a measured step only
    a pass                                      as long as with equal stages: warm-up until the rank's first backward,
                                                drain after its last forward, dependency between; what the wait is
                                                longer than that: imbalance

Behind the last pass of all, what reductions cover is reduction, what longer steps of other ranks cover is imbalance,
and the rest is host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedules.earliest import earliest
from schedules.table import JOINED, KIND, B, F, I

if TYPE_CHECKING:
    from schedules.schedule import Schedule
    from schedules.timeline import Span, Timeline

Floats = NDArray[np.float64]
Integers = NDArray[np.intp]

CAUSES = ("warm-up", "drain", "dependency", "imbalance", "reduction", "link", "host")
WARM_UP, DRAIN, DEPENDENCY, IMBALANCE, REDUCTION, LINK, HOST = range(len(CAUSES))

NOBODY = -1
TINY = 1e-12  # of the step: shorter than what sums of times are exact to


class Bubble(NamedTuple):
    """An idle stretch with one cause."""

    rank: int
    start: float
    end: float
    cause: str
    waits_for: str | None
    """The entry it waits for; None when everything it needs was there."""


class Pieces(NamedTuple):
    """Idle stretches with one cause each, in order of rank and time; arrays of shape (pieces,)."""

    rank: Integers
    start: Floats
    end: Floats
    cause: Integers
    """The cause's place in CAUSES."""
    waits_for: Integers
    """The entry of another rank that it waits for, or NOBODY."""


class Gaps(NamedTuple):
    """All idle stretches in order of rank and time; arrays of shape (gaps,)."""

    rank: Integers
    start: Floats
    end: Floats
    before: Integers
    """The entry that ends it; the number of entries where the step ends it."""
    waits_for: Integers
    """The entry of another rank that it waits for, or NOBODY."""
    parts: Floats
    """Seconds for each cause, shape (gaps, causes); they add up to the gap."""


def find_gaps(timeline: Timeline) -> Gaps:
    """Every idle stretch, and what it is made of."""
    gaps = _traced(timeline)
    waits = _waits(gaps)
    ordinary = np.minimum(waits, _waits_of_equal_stages(timeline, gaps))
    parts = gaps.parts
    parts[np.arange(len(waits)), _phase(timeline, gaps)] = ordinary
    parts[:, IMBALANCE] += waits - ordinary
    return gaps


def pieces(timeline: Timeline, rank: int | None = None) -> Pieces:
    """The gaps, of all ranks or of one, cut where the cause changes: first the wait for passes of others, then what
    delayed this rank."""
    gaps = timeline.gaps
    first, behind = (0, len(gaps.rank)) if rank is None else np.searchsorted(gaps.rank, (rank, rank + 1)).tolist()
    parts = gaps.parts[first:behind]
    gap, cause = np.nonzero(parts > TINY * timeline.step_time)
    end = (gaps.start[first:behind, None] + np.cumsum(parts, axis=1))[gap, cause]
    waits = np.where((cause == HOST) | (cause == REDUCTION), NOBODY, gaps.waits_for[first:behind][gap])
    return Pieces(gaps.rank[first:behind][gap], end - parts[gap, cause], end, cause, waits)


def bubbles(timeline: Timeline) -> tuple[Bubble, ...]:
    """The pieces of all gaps as objects."""
    found = pieces(timeline)
    names = {entry: timeline.schedule.entry_text(entry) for entry in np.unique(found.waits_for).tolist() if entry >= 0}
    return tuple(
        Bubble(rank, start, end, CAUSES[cause], names.get(entry))
        for rank, start, end, cause, entry in zip(*(column.tolist() for column in found), strict=True)
    )


def idle_by_cause(timeline: Timeline) -> tuple[Mapping[str, float], ...]:
    """For each rank the fraction of the step lost to each of the CAUSES."""
    totals = np.zeros((timeline.schedule.ranks, len(CAUSES)))
    np.add.at(totals, timeline.gaps.rank, timeline.gaps.parts)
    shares = totals / (timeline.step_time or 1.0)
    return tuple(dict(zip(CAUSES, row, strict=True)) for row in shares.tolist())


def critical_path(timeline: Timeline) -> tuple[Span, ...]:
    """The chain of passes from the start of the step to the pass that ends last."""
    chains = _Chains.of(timeline)
    by_message, path = chains.by_message, []
    node = int(np.argmax(chains.end)) if len(chains.end) else NOBODY
    while node != NOBODY:
        path.append(timeline.span(node))
        node = int(chains.sender[node] if by_message[node] else chains.previous[node])
    return tuple(reversed(path))


class _Chains(NamedTuple):
    """For each entry when it ran and what it waited for; shape (entries,)."""

    start: Floats
    end: Floats
    previous: Integers
    """The entry before it in its row, or NOBODY."""
    free: Floats
    """When its rank was free for it."""
    sender: Integers
    """The entry whose message arrived last, or NOBODY."""
    arrival: Floats
    whole: Floats
    """When the parameters of its stage were whole."""

    @staticmethod
    def of(timeline: Timeline) -> _Chains:
        schedule = timeline.schedule
        start, end = np.concatenate([*timeline.start, []]), np.concatenate([*timeline.end, []])
        firsts, behind = schedule.entries.starts[:-1], schedule.entries.starts[1:]
        previous = np.arange(len(start), dtype=np.intp) - 1
        previous[firsts[firsts < behind]] = NOBODY
        travel = timeline.hop if timeline.travel is None else timeline.travel
        arrivals = np.append(end, -np.inf)[schedule.senders] + travel
        last = np.argmax(arrivals, axis=0)[None]
        sender = np.take_along_axis(schedule.senders, last, axis=0)[0]
        return _Chains(
            start=start,
            end=end,
            previous=previous,
            free=np.append(end, 0.0)[previous],
            sender=np.where(sender == len(start), NOBODY, sender),
            arrival=np.take_along_axis(arrivals, last, axis=0)[0],
            whole=np.full(len(start), -np.inf) if timeline.whole is None else timeline.whole,
        )

    @property
    def by_message(self) -> NDArray[np.bool_]:
        """Whether the message, and not the rank, is what an entry had to wait for."""
        return self.arrival > self.free


def _traced(timeline: Timeline) -> Gaps:
    """All gaps with their link, host and reduction; the waits for passes of others are what is left."""
    chains = _Chains.of(timeline)
    rank, start, end, before = _stretches(timeline, chains)
    at_end = before == len(chains.start)
    last = int(np.argmax(chains.end)) if len(chains.end) else NOBODY

    # The last leg of the chain: nothing that explains the wait, and before that a message under way.
    sender = np.append(chains.sender, last)[before]
    arrival = np.append(chains.arrival, chains.end.max(initial=0.0))[before]
    there = np.where(sender == NOBODY, start, np.clip(arrival, start, end))
    sent = np.where(at_end | (sender == NOBODY), there, np.clip(np.append(chains.end, 0.0)[sender], start, there))
    parts = np.zeros((len(rank), len(CAUSES)))
    parts[:, REDUCTION] = np.clip(np.append(chains.whole, -np.inf)[before], there, end) - there
    parts[:, HOST] = end - there - parts[:, REDUCTION]
    parts[:, LINK] = there - sent

    gaps = Gaps(rank, start, end, before, sender, parts)
    _walk(chains, gaps, sent)
    _take_the_end(timeline, gaps, at_end, there)
    return gaps


def _waits(gaps: Gaps) -> Floats:
    """Seconds that each gap waits for passes of other ranks."""
    waits: Floats = gaps.end - gaps.start - gaps.parts.sum(axis=1)
    return np.maximum(waits, 0.0)


def _waits_of_equal_stages(timeline: Timeline, gaps: Gaps) -> Floats:
    """What the waits of ``gaps`` would be, were every pass of a kind as long as their mean."""
    schedule = timeline.schedule
    took = np.concatenate([*timeline.end, []]) - np.concatenate([*timeline.start, []])
    kind = _kind_of_entry(schedule)
    mean = np.bincount(kind, weights=took) / np.maximum(np.bincount(kind), 1)
    equal = mean[kind]
    if np.allclose(took, equal, rtol=1e-9, atol=0.0):
        return np.full(len(gaps.rank), np.inf)
    delay = np.where(schedule.senders == len(took), 0.0, timeline.hop if timeline.travel is None else timeline.travel)
    times = earliest(schedule.entries.starts, schedule.senders, delay, equal, schedule.describe)
    cuts = schedule.entries.starts[1:-1]
    others = _traced(
        replace(
            timeline,
            start=tuple(np.split(times.start, cuts)),
            end=tuple(np.split(times.end, cuts)),
            other=(),
            whole=None,
        )
    )
    # A gap is known by the entry that ends it, or by its rank where the step ends it.
    waits = np.zeros(len(took) + schedule.ranks)
    waits[_name(others, len(took))] = _waits(others)
    return waits[_name(gaps, len(took))]


def _name(gaps: Gaps, entries: int) -> Integers:
    return np.where(gaps.before == entries, entries + gaps.rank, gaps.before)


def _kind_of_entry(schedule: Schedule) -> Integers:
    """A number for the kind of each entry; a pair of kinds is a kind of its own."""
    kind, first = schedule.actions[:, KIND], schedule.entries.first_action
    joined = schedule.actions[first, JOINED]
    number: Integers = (kind[first] + joined * 4 * (1 + kind[first + joined])).astype(np.intp)
    return number


def _stretches(timeline: Timeline, chains: _Chains) -> tuple[Integers, Floats, Floats, Integers]:
    """Rank, start, end and following entry of whatever is neither a pass nor a step."""
    starts, count = timeline.schedule.entries.starts, len(chains.start)
    ranks = np.arange(timeline.schedule.ranks)
    finished = np.append(chains.end, 0.0)[np.where(np.diff(starts) > 0, starts[1:] - 1, count)]
    rank = np.concatenate([timeline.schedule.entries.rank, ranks])
    start = np.concatenate([chains.free, finished])
    end = np.concatenate([chains.start, np.full(len(ranks), timeline.step_time)])
    before = np.concatenate([np.arange(count), np.full(len(ranks), count)])

    for span in timeline.other:
        if span.track == "step":
            # Cut the stretch it falls into in two.
            inside = np.flatnonzero((rank == span.rank) & (start < span.end) & (end > span.start))
            rank, before = np.append(rank, rank[inside]), np.append(before, before[inside])
            start = np.append(start, np.full(len(inside), span.end))
            end = np.append(end, end[inside])
            end[inside] = np.maximum(span.start, start[inside])

    order = np.lexsort((start, rank))
    order = order[(end - start)[order] > TINY * timeline.step_time]
    return rank[order], start[order], end[order], before[order]


def _walk(chains: _Chains, gaps: Gaps, until: Floats) -> None:
    """Go back in all gaps at once, from ``until`` to their starts, and add link and host to their parts."""
    active = np.flatnonzero((gaps.waits_for != NOBODY) & (until > gaps.start))
    node, until, start = gaps.waits_for[active], until[active], gaps.start[active]
    by_message, sent = chains.by_message, np.append(chains.end, 0.0)
    ready = np.maximum(chains.free, chains.arrival)
    while active.size:
        began = np.clip(chains.start[node], start, until)
        there = np.clip(ready[node], start, began)
        shared = np.clip(chains.whole[node], there, began) - there
        gaps.parts[active, REDUCTION] += shared
        gaps.parts[active, HOST] += began - there - shared
        message = by_message[node]
        node = np.where(message, chains.sender[node], chains.previous[node])
        until = np.where(message, np.clip(sent[node], start, there), there)
        gaps.parts[active, LINK] += there - until
        goes_on = (node != NOBODY) & (until > start)
        active, node, until, start = active[goes_on], node[goes_on], until[goes_on], start[goes_on]


def _take_the_end(timeline: Timeline, gaps: Gaps, at_end: NDArray[np.bool_], there: Floats) -> None:
    """Behind the last pass of all: move from host what is spent on reductions, and on longer steps of others."""
    for track, cause in (("reduce", REDUCTION), ("step", IMBALANCE)):
        covered = np.zeros(len(gaps.rank))
        for begin, end in _together(span for span in timeline.other if span.track == track):
            covered += np.maximum(np.minimum(gaps.end, end) - np.maximum(there, begin), 0.0)
        moved = np.where(at_end, np.minimum(covered, gaps.parts[:, HOST]), 0.0)
        gaps.parts[:, cause] += moved
        gaps.parts[:, HOST] -= moved


def _together(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """The stretches that at least one of the spans covers."""
    found: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda one: one.start):
        if found and span.start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], span.end)
        else:
            found.append((span.start, span.end))
    return found


def _phase(timeline: Timeline, gaps: Gaps) -> Integers:
    """What an ordinary wait is called in each gap."""
    schedule = timeline.schedule
    entries, kind = schedule.entries, schedule.actions[:, KIND]
    warm = entries.starts[:-1].copy()  # the last entry before which the rank warms up
    if not schedule.forward_only:
        backward = entries.of_action[(kind == B) | (kind == I)]
        warm[:] = len(entries.rank)
        np.minimum.at(warm, entries.rank[backward], backward)
    last_forward = np.full(schedule.ranks, -1)
    forward = entries.of_action[kind == F]
    np.maximum.at(last_forward, entries.rank[forward], forward)
    in_drain = gaps.before > last_forward[gaps.rank]
    return np.where(gaps.before <= warm[gaps.rank], WARM_UP, np.where(in_drain, DRAIN, DEPENDENCY))

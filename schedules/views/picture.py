"""What every view draws: a timeline as flat arrays, and its numbers as people write them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from schedules.action import actions_of, parse_entry
from schedules.causes import NOBODY
from schedules.schedule import Schedule
from schedules.table import JOINED, KIND, MICRO_BATCH, STAGE
from schedules.timeline import Span, Timeline
from schedules.views.palette import KINDS, STEP

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

NO_NUMBER = 2**32 - 1
"""The stage and the micro-batch of what has none, such as an optimizer step."""
MOST_ROWS = 64
"""More ranks than this are drawn as an overview."""


class Row(NamedTuple):
    """What one rank works on, in order of time: arrays of shape (actions,); both halves of a Pair have its times."""

    start: Floats
    end: Floats
    kind: Integers
    stage: Integers
    micro_batch: Integers
    chunk: Integers
    """Which of the rank's stages it is, counted from 0."""
    half: Integers
    """0 for an action that runs alone, 1 and 2 for the halves of a Pair, which stand side by side."""


def row(timeline: Timeline, rank: int) -> Row:
    """The work of one rank, its optimizer steps included."""
    schedule = timeline.schedule
    table, entries = schedule.table(rank), schedule.entries
    entry = entries.of_action[schedule.row_starts[rank] : schedule.row_starts[rank + 1]] - entries.starts[rank]
    stages = np.array(schedule.stages_of_rank(rank))
    steps = [span for span in timeline.other if span.rank == rank and span.track == "step"]
    nothing = np.full(len(steps), NO_NUMBER)
    start = np.concatenate([timeline.start[rank][entry], [span.start for span in steps]])
    order = np.argsort(start, kind="stable")

    def merged(of_passes: ArrayLike, of_steps: ArrayLike) -> Integers:
        return np.concatenate([np.asarray(of_passes, dtype=np.int64), np.asarray(of_steps, dtype=np.int64)])[order]

    return Row(
        start=start[order],
        end=np.concatenate([timeline.end[rank][entry], [span.end for span in steps]])[order],
        kind=merged(table[:, KIND], np.full(len(steps), STEP)),
        stage=merged(table[:, STAGE], nothing),
        micro_batch=merged(table[:, MICRO_BATCH], nothing),
        chunk=merged(np.searchsorted(stages, table[:, STAGE]), np.zeros(len(steps))),
        half=merged(table[:, JOINED] + 2 * np.roll(table[:, JOINED], 1), np.zeros(len(steps))),
    )


def beside(timeline: Timeline, rank: int) -> dict[str, list[Span]]:
    """The spans of a rank on tracks beside its own work, in order of time."""
    tracks: dict[str, list[Span]] = {}
    for span in sorted((one for one in timeline.other if one.rank == rank), key=lambda one: one.start):
        if span.track not in ("compute", "step"):
            tracks.setdefault(span.track, []).append(span)
    return tracks


def waited_for(timeline: Timeline, entries: Integers) -> list[str]:
    """What the entries that bubbles wait for are called, as ``4F2`` or ``4F2 + 7B0``; empty for NOBODY."""
    names = {NOBODY: ""}
    for entry in np.unique(entries).tolist():
        if entry != NOBODY:
            names[entry] = " + ".join(map(str, actions_of(parse_entry(timeline.schedule.entry_text(entry)))))
    return [names[entry] for entry in entries.tolist()]


def memory_steps(timeline: Timeline, rank: int, resolution: float) -> tuple[Floats, Floats]:
    """The live activations of a rank as the corners of a step line, to be joined from left to right.

    Of changes within one ``resolution`` of time only what rises above both sides is kept: where a pass frees what the
    next one takes at once there is no notch.
    """
    times, live = timeline.memory(rank)
    first = np.flatnonzero(np.diff(np.floor(times / resolution), prepend=-1.0) != 0) if resolution > 0 else np.arange(1)
    last = live[np.append(first[1:], len(live)) - 1]
    before = np.concatenate([[0.0], last[:-1]])
    top = np.maximum(np.maximum.reduceat(live, first), np.maximum(before, last))
    corners = np.stack([before, top, last], axis=1)
    return (
        np.append(np.repeat(times[first], 3), timeline.step_time),
        np.append(corners.ravel(), last[-1]),
    )


def marks(end: float, most: int) -> list[float]:
    """At most about ``most`` round times from 0 to ``end``: multiples of 1, 2 or 5 times a power of ten."""
    if not end > 0:
        return [0.0]
    rough = end / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(k * power for k in (1, 2, 5, 10, 20) if k * power >= rough * (1 - 1e-9))
    return [k * step for k in range(int(end / step * (1 + 1e-9)) + 1)]


def occupancy(timeline: Timeline, bands: int, columns: int) -> Floats:
    """Which share of each cell goes to each kind, shape (bands, columns, kinds); the rest of a cell is idle.

    The step is cut into ``columns`` equal times, the ranks into ``bands`` groups of neighbours.
    """
    ranks = timeline.schedule.ranks
    edges = np.linspace(0.0, timeline.step_time or 1.0, columns + 1)
    cells = np.zeros((bands, columns, len(KINDS)))
    counts = np.bincount(np.arange(ranks) * bands // ranks, minlength=bands)
    for rank in range(ranks):
        work = row(timeline, rank)
        middle = (work.start + work.end) / 2  # as if the halves of a pair ran one after the other
        start, end = np.where(work.half == 2, middle, work.start), np.where(work.half == 1, middle, work.end)
        times = np.stack([start, end], axis=1).ravel()
        for kind in np.unique(work.kind):
            lasted = np.where(work.kind == kind, end - start, 0.0)
            done = np.cumsum(np.stack([np.zeros_like(lasted), lasted], axis=1).ravel())
            until = np.interp(edges, times, done) if len(times) else np.zeros(columns + 1)
            cells[rank * bands // ranks, :, kind] += np.diff(until)
    cells /= counts[:, None, None] * (edges[1] - edges[0])
    return cells


def crowded(timeline: Timeline, per_time: float) -> bool:
    """Whether ranks or passes are too many to be drawn one by one: passes shorter than ``1 / per_time`` on average."""
    return timeline.schedule.ranks > MOST_ROWS or sum(timeline.busy) * per_time < len(timeline.schedule.actions)


def stack(timeline: Timeline, over: Timeline | Sequence[Timeline]) -> tuple[Timeline, ...]:
    """A timeline and those it is drawn over, from top to bottom."""
    return (timeline, *([over] if isinstance(over, Timeline) else over))


def headings(timelines: Sequence[Timeline]) -> tuple[str, ...]:
    """What to call each: its schedule, and as much more as tells them apart."""
    names = [timeline.schedule.name for timeline in timelines]
    stages = [f"{one.schedule.name}, {_counted(one.schedule.stages_per_rank, 'stage')} a rank" for one in timelines]
    kinds = [f"{timeline.kind} {timeline.schedule.name}" for timeline in timelines]
    numbered = [f"{kind} ({number})" for number, kind in enumerate(kinds, start=1)]
    return tuple(next(words for words in (names, stages, kinds, numbered) if len(set(words)) == len(words)))


def shape(schedule: Schedule) -> str:
    """``8 ranks, 16 micro-batches, 3 stages a rank``."""
    parts = [_counted(schedule.ranks, "rank"), _counted(schedule.micro_batches, "micro-batch")]
    if schedule.stages_per_rank != 1:
        parts.append(f"{_counted(schedule.stages_per_rank, 'stage')} a rank")
    return ", ".join(parts)


def amount(value: float) -> str:
    """Four significant digits, without an exponent and without zeros at the end: ``27.27``, ``1234``."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    digits = max(0, 3 - math.floor(math.log10(abs(value))))
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def duration(value: float, unit: str = "s") -> str:
    """A time: seconds with the prefix that fits, or, for any other unit, the number and the unit's name."""
    return durations([value], unit)[0]


def durations(values: Sequence[float], unit: str = "s") -> list[str]:
    """Times along an axis: as ``duration``, but all with the prefix that fits the longest."""
    scale, name = _prefix(max(map(abs, values), default=0.0)) if unit == "s" else (1.0, unit)
    return [f"{amount(value / scale)} {name}".rstrip() for value in values]


def percent(share: float) -> str:
    """``27.3 %``."""
    return f"{100 * share:.1f} %"


def _prefix(seconds: float) -> tuple[float, str]:
    return next(
        ((scale, name) for scale, name in ((1.0, "s"), (1e-3, "ms")) if seconds >= scale or seconds == 0), (1e-6, "µs")
    )


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 'es' if what.endswith('ch') else 's'}"

"""A timeline in the terminal: one row a rank, to scale, readable in 80 columns, without colour and in plain ASCII.

rank                                                                      idle
   0  F0F1F2F3╱╱╱╱╱╱╱╱╱╱╱╱B0──F4B1──F5B2──F6B3──F7B4──╲╲B5──╲╲B6──╲╲B7──  27.3%
   1  ╱╱F0F1F2╱╱╱╱╱╱╱╱B0──F3B1──F4B2──F5B3──F6B4──F7B5──╲╲B6──╲╲B7──╲╲╲╲  27.3%
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence

import numpy as np

from schedules.causes import CAUSES as NAMES
from schedules.causes import Pieces, pieces
from schedules.table import KIND
from schedules.timeline import Timeline
from schedules.views.palette import CAUSES, KINDS, shade
from schedules.views.picture import (
    MOST_ROWS,
    NO_NUMBER,
    Floats,
    Row,
    amount,
    crowded,
    duration,
    durations,
    headings,
    marks,
    occupancy,
    percent,
    row,
    shape,
    stack,
)

LEVELS = " ▂▄▆█"
"""How busy, where single passes are too short to be drawn."""
BANDS = 32
"""Rows of an overview of more ranks than can be read."""
SHORTEST = 0.75
"""Columns of a pass below which rows show only how busy they are."""
LABEL, IDLE = 6, 7
"""Columns to the left and to the right of a row."""
ASCII = str.maketrans(
    {look.glyph: look.ascii for look in CAUSES.values()}
    | dict(zip(LEVELS, " .oO#", strict=True))
    | {"─": "-", "×": "x", "µ": "u", "…": "."}
)


def draw(
    timeline: Timeline,
    *,
    over: Timeline | Sequence[Timeline] = (),
    unit: str = "s",
    width: int = 80,
    colour: bool = False,
    ascii: bool = False,
) -> str:
    """The timeline, and below it those it is drawn over on the same time axis, with the difference in words.

    ``width``: columns, at least 40. ``colour``: ANSI colours. ``ascii``: no other characters than ASCII. ``unit`` as
    in ``Timeline.save``.
    """
    timelines = stack(timeline, over)
    width = max(40, width)
    columns = width - LABEL - IDLE
    scale = _columns_per_time(timelines, columns)
    lines: list[str] = []
    for heading, one in zip(headings(timelines), timelines, strict=True):
        title = f"{heading}: {shape(one.schedule)}" + ("" if one.kind in heading else f" ({one.kind})")
        lines += _wrapped(title, width)
        lines += [*_rows(one, scale, columns, colour), _axis(timelines, scale, unit, width)]
        lines += [*_numbers(one, unit, width), ""]
    for other in timelines[1:]:
        lines += [*_wrapped(timeline.difference(other).text(), width), ""]
    lines += _legend(timelines, width, [crowded(one, scale / SHORTEST) for one in timelines])
    drawn = "\n".join(line.rstrip() for line in lines)
    return drawn.translate(ASCII) if ascii else drawn


def _columns_per_time(timelines: Sequence[Timeline], columns: int) -> float:
    """The scale: the longest step fills the width, or nearly if the shortest pass then has whole columns."""
    longest = max(one.step_time for one in timelines)
    lengths = np.concatenate([end - start for one in timelines for start, end in zip(one.start, one.end, strict=True)])
    shortest = lengths[lengths > 0].min(initial=np.inf)
    if not longest:
        return 0.0
    whole = np.floor(columns * shortest / longest * (1 + 1e-9)) / shortest if np.isfinite(shortest) else 0.0
    return float(whole if whole * longest > 0.85 * columns else columns / longest)


def _rows(timeline: Timeline, scale: float, columns: int, colour: bool) -> Iterator[str]:
    yield f"{'rank':<{LABEL + columns}}{'idle':>{IDLE}}"
    if crowded(timeline, scale / SHORTEST):
        yield from _overview(timeline, scale, columns, colour)
        return
    centres: Floats = np.asarray((np.arange(columns) + 0.5) / (scale or np.nan), dtype=np.float64)
    for rank, idle in enumerate(timeline.idle):
        work = row(timeline, rank)
        cells = [" "] * columns
        _fill_bubbles(cells, pieces(timeline, rank), centres, colour)
        _fill_work(cells, work, centres, timeline.schedule.stages_of_rank(rank), colour)
        yield f"{rank:>{LABEL - 2}}  {''.join(cells)}{100 * idle:>{IDLE - 1}.1f}%"


def _fill_bubbles(cells: list[str], bubbles: Pieces, centres: Floats, colour: bool) -> None:
    columns = np.searchsorted(centres, np.stack([bubbles.start, bubbles.end], axis=1)).tolist()
    for cause, (first, behind) in zip(bubbles.cause.tolist(), columns, strict=True):
        glyph = CAUSES[NAMES[cause]].glyph
        cells[first:behind] = [f"\x1b[2m{glyph}\x1b[0m" if colour else glyph] * (behind - first)


def _fill_work(cells: list[str], work: Row, centres: Floats, stages: tuple[int, ...], colour: bool) -> None:
    """A column belongs to the pass that runs at its middle, so what is drawn is to scale."""
    first = np.searchsorted(centres, work.start).tolist()
    last = np.searchsorted(centres, work.end).tolist()
    position = 0
    while position < len(first):
        members = range(position, position + (2 if work.half[position] else 1))  # the halves of a pair share columns
        width = last[position] - first[position]
        label = _label(work, members, width)
        for offset, character in enumerate(label):
            fill = shade(int(work.kind[position]), int(work.chunk[position]), len(stages))
            cells[first[position] + offset] = _painted(character, fill) if colour else character
        position = members.stop


def _label(work: Row, members: range, width: int) -> str:
    """``width`` characters for a pass or a pair: the kind's letter, the micro-batch as far as there is room, a line."""
    names = []
    for i in members:
        letter = KINDS[work.kind[i]].name[0].upper()
        names.append(letter if work.chunk[i] == 0 else letter.lower())
    numbers = ["" if work.micro_batch[i] == NO_NUMBER else str(work.micro_batch[i]) for i in members]
    whole = "".join(name + number for name, number in zip(names, numbers, strict=True))
    if len(whole) > width:
        whole = "".join(name + number[-1:] for name, number in zip(names, numbers, strict=True))
    if len(whole) > width:
        whole = "".join(names) if len(names) <= width else "X"
    return whole[:width].ljust(width, "─")


def _overview(timeline: Timeline, scale: float, columns: int, colour: bool) -> Iterator[str]:
    """Rows of how busy; where there are many ranks a row is the mean of neighbours."""
    ranks = timeline.schedule.ranks
    bands = ranks if ranks <= MOST_ROWS else BANDS
    drawn = max(1, min(columns, round(timeline.step_time * scale)))
    shares = occupancy(timeline, bands, drawn)
    idle = np.array(timeline.idle)
    band_of_rank = np.arange(ranks) * bands // ranks
    for band, busy in enumerate(shares):
        members = np.flatnonzero(band_of_rank == band)
        cells = "".join(_mixed(cell) if colour else LEVELS[min(4, int(cell.sum() * 4 + 0.5))] for cell in busy)
        label = f"{members[0]:>{LABEL - 2}}{'… ' if len(members) > 1 else '  '}"
        yield f"{label}{cells}{' ' * (columns - drawn)}{100 * idle[members].mean():>{IDLE - 1}.1f}%"


def _axis(timelines: Sequence[Timeline], scale: float, unit: str, width: int) -> str:
    longest = max(one.step_time for one in timelines)
    line = ""
    times = marks(longest, max(2, round(longest * scale / 12)))
    for time, words in zip(times, durations(times, unit), strict=True):
        column = LABEL + round(time * scale)
        if column > len(line) and column + len(words) <= width:
            line = line.ljust(column) + words
    return line


def _numbers(timeline: Timeline, unit: str, width: int) -> list[str]:
    peaks = [amount(peak) for peak in timeline.peak_activations]
    if len(peaks) > 8:
        most = max(timeline.peak_activations)
        peaks = [f"{peaks[0]} on rank 0", f"{peaks[-1]} on rank {len(peaks) - 1}", f"at most {amount(most)}"]
    causes = []
    for cause, look in CAUSES.items():
        share = float(np.mean([by_cause[cause] for by_cause in timeline.idle_by_cause]))
        if share > 0:
            causes.append(f"{look.glyph}\xa0{cause}\xa0{percent(share)}")
    lines = (
        f"step time {duration(timeline.step_time, unit)}, bubble {percent(timeline.bubble)}, "
        f"span bubble {percent(timeline.span_bubble)}",
        f"idle: {', '.join(causes) or 'never'}",
        f"peak activations, in micro-batches a rank: {', '.join(peaks)}",
    )
    return [part for line in lines for part in _wrapped(line, width)]


def _legend(timelines: Sequence[Timeline], width: int, crowds: Sequence[bool]) -> Iterator[str]:
    kinds = sorted({int(kind) for one in timelines for kind in np.unique(one.schedule.actions[:, KIND])})
    parts = [f"{KINDS[kind].name} {KINDS[kind].words}" for kind in kinds]
    if any(span.track == "step" for one in timelines for span in one.other):
        parts.append("S optimizer step")
    if max(one.schedule.stages_per_rank for one in timelines) > 1:
        parts.append("lower case: not the rank's first stage")
    if max(one.schedule.micro_batches for one in timelines) > 10:
        parts.append("digits: micro-batch, or its last digit")
    if not all(crowds):
        yield from _wrapped(", ".join(parts), width)
    if any(crowds):
        yield from _wrapped(f"rows of {' '.join(LEVELS[1:])}: how much of the time a rank works", width)
    yield from _wrapped(
        "bubble: idle share of ranks × step time; span bubble: of ranks × the longest rank's own span", width
    )


def _wrapped(words: str, width: int) -> list[str]:
    """Lines of at most ``width``, a number and its unit together."""
    held = re.sub(r"(?<=\d) (?=%|s\b|ms\b|µs\b)", "\xa0", words)
    return [line.replace("\xa0", " ") for line in textwrap.wrap(held, width, break_on_hyphens=False)]


def _painted(character: str, fill: str) -> str:
    """A dark character on a fill; where the fill shows, the line between label and end is not needed."""
    red, green, blue = (int(fill[i : i + 2], 16) for i in (1, 3, 5))
    return f"\x1b[48;2;{red};{green};{blue};38;2;21;24;28m{' ' if character == '─' else character}\x1b[0m"


def _mixed(shares: Floats) -> str:
    """A column in the mixture of the colours of what runs in it, grey where nothing does."""
    colours = np.array([[int(look.colour[i : i + 2], 16) for i in (1, 3, 5)] for look in KINDS])
    mixed = shares @ colours + (1 - shares.sum()) * np.array([96, 96, 96])
    red, green, blue = np.clip(mixed, 0, 255).astype(int)
    return f"\x1b[48;2;{red};{green};{blue}m \x1b[0m"

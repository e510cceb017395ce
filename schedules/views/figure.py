"""A timeline as a figure for papers and READMEs: PNG or SVG, drawn by matplotlib.

Per timeline a panel of rows, one a rank, to scale, with hatched and named bubbles and the idle share at the right, and
below it the memory curves. All panels share the time axis. Many ranks become an overview of how busy they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from schedules.causes import CAUSES as NAMES
from schedules.causes import pieces
from schedules.errors import MissingLibrary
from schedules.table import KIND
from schedules.timeline import Timeline
from schedules.views.palette import CAUSES, KINDS, LATER, STEP, TRACKS, shade
from schedules.views.picture import (
    MOST_ROWS,
    NO_NUMBER,
    amount,
    beside,
    crowded,
    duration,
    durations,
    headings,
    marks,
    memory_steps,
    occupancy,
    percent,
    row,
    shape,
    stack,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, DPI = 10.0, 160
ROW, MEMORY, TITLE, TOP, FOOT = 0.26, 0.95, 0.44, 0.32, 0.62  # inches
LEFT, RIGHT = 0.8, 0.75
SHORTEST, BUBBLE = 0.01, 0.06
"""Inches of a pass below which rows show only how busy they are, and of the bubbles that are hatched then."""
DIGIT, LETTER = 0.058, 0.09
"""Inches that a digit on a pass, and a letter of a bubble's name with its margins, take."""
ROW_FILL = 0.84
"""The share of a row's height that is filled."""
MOST_RECTANGLES = 2000
"""A path of many more is slow to fill, and past some number matplotlib refuses it."""
GREY, SOFT, PAPER = "#a9adb2", "#5b6570", "#f3f3f1"
HATCHES = {look.hatch: look.hatch * 7 for look in CAUSES.values()} | {"x": "xxxxxx", ".": "....", "+": "++++++"}
STYLE: dict[Any, Any] = {
    "font.size": 8,
    "font.family": "DejaVu Sans",
    "hatch.linewidth": 0.5,
    "svg.hashsalt": "pipeloom",
    "axes.linewidth": 0.6,
}


def write(timeline: Timeline, path: str | Path, *, over: Timeline | Sequence[Timeline] = (), unit: str = "s") -> None:
    """Write the figure in the format that the ending of ``path`` names; see ``draw``."""
    figure = draw(timeline, over=over, unit=unit)
    from matplotlib import rc_context

    # Without its date an SVG of the same timeline is the same bytes.
    metadata = {"Date": None} if Path(path).suffix.lower() == ".svg" else None
    with rc_context(STYLE):
        figure.savefig(path, dpi=DPI, metadata=metadata)


def draw(timeline: Timeline, *, over: Timeline | Sequence[Timeline] = (), unit: str = "s") -> Figure:
    """The figure of a timeline, above those it is drawn over; ``unit`` as in ``Timeline.save``.

    Raises MissingLibrary without matplotlib.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingLibrary(
            "pictures (.png, .svg) need matplotlib: pip install 'pipeloom[viz]', or save as .html, which needs nothing"
        ) from error
    timelines = stack(timeline, over)
    end = max(one.step_time for one in timelines) or 1.0
    highest = max(max(one.peak_activations) for one in timelines)
    total = TOP - TITLE + FOOT + sum(TITLE + _row_height(one) + MEMORY for one in timelines)
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, total))
        top = total + TITLE - TOP
        for heading, one in zip(headings(timelines), timelines, strict=True):
            top -= TITLE + _row_height(one)
            rows = figure.add_axes(_box(top, _row_height(one), total))
            _draw_rows(rows, one, end)
            title = f"{heading}: {shape(one.schedule)}" + ("" if one.kind in heading else f" ({one.kind})")
            numbers = (
                f"step {duration(one.step_time, unit)}   bubble {percent(one.bubble)}   "
                f"span bubble {percent(one.span_bubble)}"
            )
            _above(rows, 0.0, title, "left", weight="bold")
            _above(rows, 1.0, numbers, "right")
            top -= MEMORY
            memory = figure.add_axes(_box(top + 0.12, MEMORY - 0.2, total), sharex=rows)
            _draw_memory(memory, one, highest)
            _draw_times(memory, end, unit, labelled=one is timelines[-1])
        _draw_legend(figure, timelines)
    return figure


# Where things stand, in inches from the bottom and in fractions of the figure.


def _row_height(timeline: Timeline) -> float:
    return ROW * min(timeline.schedule.ranks, MOST_ROWS) if timeline.schedule.ranks <= 16 else 4.2


def _box(bottom: float, height: float, total: float) -> tuple[float, float, float, float]:
    return (LEFT / WIDTH, bottom / total, (WIDTH - LEFT - RIGHT) / WIDTH, height / total)


def _above(axes: Axes, x: float, words: str, side: str, weight: str = "normal") -> None:
    axes.annotate(
        words, (x, 1.0), xycoords="axes fraction", xytext=(0, 5), textcoords="offset points", ha=side, weight=weight
    )


# The rows.


def _draw_rows(axes: Axes, timeline: Timeline, end: float) -> None:
    ranks = timeline.schedule.ranks
    axes.set_xlim(0, end)
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelbottom=False)
    named = range(ranks) if ranks <= 16 else np.unique(np.linspace(0, ranks - 1, 9).round().astype(int))
    axes.set_yticks(list(named), [f"rank {rank}" for rank in named], color=SOFT)
    for rank in named:
        axes.annotate(
            percent(timeline.idle[rank]), (1.0, rank), xycoords=("axes fraction", "data"), xytext=(5, 0),
            textcoords="offset points", va="center", ha="left", color="black",
        )  # fmt: skip
    axes.annotate("idle", (1.0, 1.0), xycoords="axes fraction", xytext=(5, 5), textcoords="offset points", color=SOFT)
    inches = (WIDTH - LEFT - RIGHT) / end
    if crowded(timeline, inches / SHORTEST):
        _draw_overview(axes, timeline)
        _draw_bubbles(axes, timeline, inches, shortest=BUBBLE / inches, fill=1.0)
    else:
        _draw_bubbles(axes, timeline, inches, shortest=0.0, fill=ROW_FILL)
        _draw_passes(axes, timeline, inches)


def _rectangles(axes: Axes, boxes: np.ndarray, **style: Any) -> None:
    """Rectangles of one look, ``boxes`` of shape (count, 4): left, right, top, bottom; few paths, so a small SVG."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    for piece in np.split(boxes, range(MOST_RECTANGLES, len(boxes), MOST_RECTANGLES)):
        left, right, top, bottom = piece.T
        x = np.stack([left, right, right, left, left], axis=1)
        y = np.stack([top, top, bottom, bottom, top], axis=1)
        codes = np.tile([Outline.MOVETO, *[Outline.LINETO] * 3, Outline.CLOSEPOLY], len(piece))
        axes.add_patch(PathPatch(Outline(np.stack([x.ravel(), y.ravel()], axis=1), codes), **style))


def _draw_bubbles(axes: Axes, timeline: Timeline, inches: float, shortest: float, fill: float) -> None:
    """Hatched, and named where there is room: in every bubble, or where rows are low once for each cause."""
    found = pieces(timeline)
    length, high = found.end - found.start, _row_height(timeline) / timeline.schedule.ranks > 0.15
    for cause in np.unique(found.cause).tolist():
        name, look = NAMES[cause], CAUSES[NAMES[cause]]
        chosen = np.flatnonzero((found.cause == cause) & (length > shortest))
        top = found.rank[chosen] - fill / 2
        _rectangles(
            axes, np.stack([found.start[chosen], found.end[chosen], top, top + fill], axis=1), facecolor=PAPER,
            edgecolor=look.colour or GREY, hatch=HATCHES[look.hatch], linewidth=0, zorder=1,
        )  # fmt: skip
        roomy = chosen[length[chosen] * inches > LETTER * len(name)]
        for i in roomy if high else roomy[len(roomy) // 2 :][:1]:
            axes.text(
                (found.start[i] + found.end[i]) / 2, found.rank[i], name, ha="center", va="center", size=6.5,
                color=SOFT, bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1.2}, zorder=3, clip_on=True,
            )  # fmt: skip


def _draw_passes(axes: Axes, timeline: Timeline, inches: float) -> None:
    chunks = max(1, timeline.schedule.stages_per_rank)
    height = _row_height(timeline) / timeline.schedule.ranks
    room = DIGIT * len(str(timeline.schedule.micro_batches - 1)) / inches  # all numbers are shown, or none of a kind
    boxes: dict[tuple[int, int], list[np.ndarray]] = {}
    for rank in range(timeline.schedule.ranks):
        work = row(timeline, rank)
        top = np.full(len(work.kind), rank - ROW_FILL / 2)
        bottom = top + ROW_FILL
        bottom[work.half == 1] = top[work.half == 2] = rank  # the first half of a pair above the second
        for kind, chunk in np.unique(np.stack([work.kind, work.chunk]), axis=1).T.tolist():
            chosen = (work.kind == kind) & (work.chunk == chunk)
            box = np.stack([work.start, work.end, top, bottom], axis=1)[chosen]
            boxes.setdefault((kind, chunk), []).append(box)
        for i in np.flatnonzero((work.end - work.start > room) & (work.micro_batch != NO_NUMBER)):
            if height > 0.15:
                middle = ((work.start[i] + work.end[i]) / 2, (top[i] + bottom[i]) / 2)
                size = 4 if bottom[i] - top[i] < 0.6 else 5.6 if work.end[i] - work.start[i] < 1.25 * room else 6.5
                axes.text(*middle, str(work.micro_batch[i]), ha="center", va="center_baseline", size=size, zorder=4)
        for track, spans in beside(timeline, rank).items():
            lines = np.array([(span.start, span.end, rank + ROW_FILL / 2, rank + 0.5) for span in spans])
            _rectangles(axes, lines, facecolor=TRACKS.get(track, SOFT), linewidth=0, zorder=3)
    points = 72 * inches * timeline.step_time * timeline.schedule.ranks / max(1, len(timeline.schedule.actions))
    for (kind, chunk), found in sorted(boxes.items()):
        _rectangles(
            axes, np.concatenate(found), facecolor=shade(kind, chunk, chunks), edgecolor="white",
            linewidth=min(0.5, points / 12), zorder=2,
        )  # fmt: skip


def _draw_overview(axes: Axes, timeline: Timeline) -> None:
    """The mixture of the colours of what runs, grey where nothing does."""
    ranks = timeline.schedule.ranks
    shares = occupancy(timeline, min(ranks, 256), 1200)
    colours = np.array([[int(look.colour[i : i + 2], 16) for i in (1, 3, 5)] for look in KINDS])
    mixed = shares @ colours + (1 - shares.sum(axis=2, keepdims=True)) * 228.0
    axes.imshow(
        np.clip(mixed, 0, 255).astype(np.uint8), aspect="auto", interpolation="nearest",
        extent=(0, timeline.step_time, ranks - 0.5, -0.5), zorder=0,
    )  # fmt: skip


# Below the rows.


def _draw_memory(axes: Axes, timeline: Timeline, highest: float) -> None:
    ranks = timeline.schedule.ranks
    shown = range(ranks) if ranks <= MOST_ROWS else np.unique(np.linspace(0, ranks - 1, 9).round().astype(int))
    for rank in shown:
        times, live = memory_steps(timeline, rank, timeline.step_time / 1500)
        share = rank / max(1, ranks - 1)
        colour = (share * 0.835, 0.447 - share * 0.078, 0.698 - share * 0.698)  # rank 0 blue, the last vermilion
        axes.plot(times, live, color=colour, lw=0.8, alpha=0.85)
    axes.set_ylim(0, highest * 1.08 or 1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylabel("live\nactivations", color=SOFT, size=7, labelpad=6)
    axes.tick_params(labelsize=7, colors=SOFT, length=2)
    peaks = timeline.peak_activations
    for place, rank in ((0.92, 0), (0.62, ranks - 1))[: min(2, ranks)]:
        axes.annotate(
            f"rank {rank}\npeak {amount(peaks[rank])}", (1.0, place), xycoords="axes fraction", xytext=(5, 0),
            textcoords="offset points", va="top", size=6.5, color="#0072B2" if rank == 0 else "#D55E00",
        )  # fmt: skip


def _draw_times(axes: Axes, end: float, unit: str, *, labelled: bool) -> None:
    at = marks(end, 10)
    axes.set_xticks(at, durations(at, unit) if labelled else [""] * len(at))


def _draw_legend(figure: Figure, timelines: Sequence[Timeline]) -> None:
    """One line for what ranks do, one for why they do nothing."""
    from matplotlib.patches import Patch

    kinds = sorted({int(kind) for one in timelines for kind in np.unique(one.schedule.actions[:, KIND])})
    handles = [Patch(facecolor=KINDS[kind].colour, label=f"{KINDS[kind].name} {KINDS[kind].words}") for kind in kinds]
    if any(one.schedule.stages_per_rank > 1 for one in timelines):
        handles.append(Patch(facecolor=shade(kinds[0], 1, 2), label=LATER))
    tracks = {span.track for one in timelines for span in one.other}
    for track, colour in {"step": KINDS[STEP].colour, **TRACKS}.items():
        if track in tracks:
            handles.append(Patch(facecolor=colour, label=track))
    causes = [
        Patch(facecolor=PAPER, edgecolor=look.colour or GREY, hatch=HATCHES[look.hatch], linewidth=0, label=cause)
        for cause, look in CAUSES.items()
        if any(by_cause[cause] > 0 for one in timelines for by_cause in one.idle_by_cause)
    ]
    height = FOOT / float(figure.get_figheight())
    for line, bottom in ((handles, 0.4 * height), (causes, 0.0)):
        if line:
            figure.legend(
                handles=line, loc="lower center", bbox_to_anchor=(0.5, bottom), ncols=len(line), frameon=False,
                fontsize=7, borderaxespad=0.2,
            )  # fmt: skip

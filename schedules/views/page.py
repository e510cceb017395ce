"""A timeline as one HTML file that needs no network, no library and no server.

The file holds its numbers packed and draws them on a canvas. Its parts lie in ``assets/``, in reading order page.html,
page.css, data.js (unpack, and look up), paint.js (draw one thing), place.js (draw all), act.js (zoom, move, explain).
"""

from __future__ import annotations

import base64
import html
import json
import string
import zlib
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from schedules.causes import pieces
from schedules.table import KIND
from schedules.timeline import Timeline
from schedules.views.palette import CAUSES, KINDS, LATER, STEP, TRACKS, shade
from schedules.views.picture import (
    MOST_ROWS,
    amount,
    beside,
    duration,
    headings,
    occupancy,
    percent,
    row,
    shape,
    stack,
    waited_for,
)

MOST_PASSES = 400_000
"""More passes than this make a file that browsers are slow to open; then only some ranks are packed in detail."""
BANDS, COLUMNS = 128, 800
"""The overview's grid."""
TICKS = 2**32 - 1
"""Times cross as whole numbers of this part of the time axis: half the size of doubles, finer than any screen."""


def write(timeline: Timeline, path: str | Path, *, over: Timeline | Sequence[Timeline] = (), unit: str = "s") -> None:
    """Write the page; see ``draw``."""
    Path(path).write_text(draw(timeline, over=over, unit=unit), encoding="utf-8")


def draw(timeline: Timeline, *, over: Timeline | Sequence[Timeline] = (), unit: str = "s") -> str:
    """The HTML of a page with the timeline, and below it those it is drawn over on the same time axis.

    ``unit`` as in ``Timeline.save``.
    """
    timelines = stack(timeline, over)
    names = headings(timelines)
    numbers = bytearray()
    data = json.dumps(_data(names, timelines, unit, numbers), separators=(",", ":"))
    parts = {
        "title": html.escape(" over ".join(names)),
        "words": "".join(f'<p class="words">{html.escape(words)}</p>' for words in _words(timelines)),
        "summary": _summary(names, timelines, unit),
        "tables": "".join(_ranks(name, one) for name, one in zip(names, timelines, strict=True)),
        "style": _asset("page.css"),
        "script": "\n".join(map(_asset, ("data.js", "paint.js", "place.js", "act.js"))),
        "data": data.replace("<", "\\u003c"),  # a name with "</script>" in it would end the element
        "numbers": base64.b64encode(zlib.compress(bytes(numbers), level=6)).decode(),
    }
    return string.Template(_asset("page.html")).substitute(parts)


def _asset(name: str) -> str:
    return (resources.files("schedules.views") / "assets" / name).read_text(encoding="utf-8")


# What stands in the page as text and tables, also for whoever sees no picture.


def _words(timelines: Sequence[Timeline]) -> list[str]:
    first, *others = timelines
    return [first.difference(other).text() for other in others] or [shape(first.schedule)]


def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    titles = "".join(f'<th scope="col">{html.escape(title)}</th>' for title in head)
    cells = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in one) + "</tr>" for one in rows)
    return (
        f'<div class="scroll"><table><caption>{html.escape(caption)}</caption>'
        f"<thead><tr>{titles}</tr></thead><tbody>{cells}</tbody></table></div>"
    )


def _summary(names: Sequence[str], timelines: Sequence[Timeline], unit: str) -> str:
    head = ("", "shape", "step time", "bubble", "span bubble", "idlest rank", "peak activations")
    rows = [
        (
            name,
            shape(one.schedule),
            duration(one.step_time, unit),
            percent(one.bubble),
            percent(one.span_bubble),
            percent(max(one.idle)),
            amount(max(one.peak_activations)),
        )
        for name, one in zip(names, timelines, strict=True)
    ]
    explanation = (
        "Bubble: idle share of ranks × step time, right when a step ends in a barrier. Span bubble: the same over the "
        "longest rank's own span, first start to last end. Peak activations: micro-batches a rank holds at once."
    )
    return _table(explanation, head, rows)


def _ranks(name: str, timeline: Timeline) -> str:
    causes = [cause for cause in CAUSES if any(by_cause[cause] > 0 for by_cause in timeline.idle_by_cause)]
    head = ("rank", "stages", "idle", *causes, "peak activations")
    rows = (
        (
            str(rank),
            ", ".join(map(str, timeline.schedule.stages_of_rank(rank))),
            percent(timeline.idle[rank]),
            *(percent(by_cause[cause]) if by_cause[cause] > 0 else "–" for cause in causes),
            amount(timeline.peak_activations[rank]),
        )
        for rank, by_cause in enumerate(timeline.idle_by_cause)
    )
    state = " open" if timeline.schedule.ranks <= 16 else ""
    table = _table("Idle time by cause, as a share of the step.", head, rows)
    return f"<details{state}><summary><b>{html.escape(name)}</b>, rank by rank</summary>{table}</details>"


# What the scripts read: JSON, in which [offset, length] stands for an array of ``numbers``.


def _data(names: Sequence[str], timelines: Sequence[Timeline], unit: str, numbers: bytearray) -> dict[str, Any]:
    end = max(one.step_time for one in timelines) or 1.0
    tracks = {span.track for one in timelines for span in one.other}
    kinds = {int(kind) for one in timelines for kind in np.unique(one.schedule.actions[:, KIND])}
    if "step" in tracks:
        kinds.add(STEP)
    causes = {cause for one in timelines for by in one.idle_by_cause for cause, share in by.items() if share > 0}
    return {
        "unit": unit,
        "end": end,
        "kinds": [look._asdict() | {"used": kind in kinds} for kind, look in enumerate(KINDS)],
        "causes": [
            {"name": name, "words": look.words, "colour": look.colour, "hatch": look.hatch, "used": name in causes}
            for name, look in CAUSES.items()
        ],
        "later": LATER,
        "tracks": {name: colour for name, colour in TRACKS.items() if name in tracks},
        "timelines": [_timeline(name, one, end, numbers) for name, one in zip(names, timelines, strict=True)],
    }


def _timeline(name: str, timeline: Timeline, end: float, numbers: bytearray) -> dict[str, Any]:
    schedule = timeline.schedule
    chunks = max(1, schedule.stages_per_rank)
    critical: dict[int, list[float]] = {}
    for span in timeline.critical_path:
        critical.setdefault(span.rank, []).append(span.start)
    packed = {
        "title": name if timeline.kind in name else f"{name} ({timeline.kind})",
        "name": schedule.name,
        "ranks": schedule.ranks,
        "step": timeline.step_time,
        "digits": len(str(schedule.micro_batches - 1)),
        "peaks": timeline.peak_activations,
        "shades": [[shade(kind, chunk, chunks) for chunk in range(chunks)] for kind in range(len(KINDS))],
        "rows": [_row(timeline, rank, critical.get(rank, []), end, numbers) for rank in _detailed(timeline)],
    }
    if schedule.ranks > MOST_ROWS:
        bands = min(BANDS, schedule.ranks)
        shares = np.rint(occupancy(timeline, bands, COLUMNS) * 255).clip(0, 255)
        packed["overview"] = {"rows": bands, "columns": COLUMNS, "cells": _pack(numbers, shares, "u1")}
    return packed


def _detailed(timeline: Timeline) -> list[int]:
    """The ranks that are packed pass by pass: all, or as many, evenly spread, as the file may hold."""
    ranks, passes = timeline.schedule.ranks, len(timeline.schedule.actions)
    most = max(16, ranks * MOST_PASSES // max(passes, 1))
    return list(range(ranks)) if most >= ranks else np.linspace(0, ranks - 1, most).round().astype(int).tolist()


def _row(timeline: Timeline, rank: int, critical: Sequence[float], end: float, numbers: bytearray) -> dict[str, Any]:
    work, bubbles = row(timeline, rank), pieces(timeline, rank)
    time, live = timeline.memory(rank)

    def times(values: ArrayLike) -> list[int]:
        share = np.clip(np.asarray(values, dtype=np.float64) / end, 0.0, 1.0)
        return _pack(numbers, np.rint(share * TICKS), "<u4")

    return {
        "rank": rank,
        "idle": timeline.idle[rank],
        "causes": [timeline.idle_by_cause[rank][cause] for cause in CAUSES],
        "stages": timeline.schedule.stages_of_rank(rank),
        "start": times(work.start),
        "end": times(work.end),
        "kind": _pack(numbers, work.kind, "u1"),
        "stage": _pack(numbers, work.stage, "<u4"),
        "batch": _pack(numbers, work.micro_batch, "<u4"),
        "chunk": _pack(numbers, work.chunk, "u1"),
        "half": _pack(numbers, work.half, "u1"),
        "bubbles": {
            "start": times(bubbles.start),
            "end": times(bubbles.end),
            "cause": _pack(numbers, bubbles.cause, "u1"),
            "waits": _append(numbers, ",".join(waited_for(timeline, bubbles.waits_for)).encode()),
        },
        "memory": {"time": times(time), "live": _pack(numbers, live, "<f4")},
        "extra": [
            {"track": track, "start": times([one.start for one in spans]), "end": times([one.end for one in spans])}
            for track, spans in beside(timeline, rank).items()
        ],
        "critical": np.flatnonzero(np.isin(work.start, critical)).tolist(),
    }


def _pack(numbers: bytearray, values: ArrayLike, form: str) -> list[int]:
    array = np.asarray(values).astype(form)
    return [_append(numbers, array.tobytes())[0], array.size]


def _append(numbers: bytearray, content: bytes) -> list[int]:
    numbers.extend(bytes(-len(numbers) % 4))  # typed arrays begin at multiples of their size
    numbers.extend(content)
    return [len(numbers) - len(content), len(content)]

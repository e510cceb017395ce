"""A timeline as one HTML file that needs no network, no library and no server.

The file holds its numbers packed as base64 and draws them on a canvas: ``assets/`` has its parts, in reading order
page.html, page.css, data.js (unpack and look up), paint.js (draw one thing), page.js (place things, zoom, hover).
"""

from __future__ import annotations

import base64
import html
import json
import string
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from schedules.timeline import Span, Timeline
from schedules.views.palette import CAUSES, KINDS, LATER, TRACKS, shade
from schedules.views.picture import (
    MOST_ROWS,
    amount,
    beside,
    bubbles_by_rank,
    duration,
    headings,
    occupancy,
    percent,
    row,
    shape,
    stack,
)

MOST_PASSES = 400_000
"""More passes than this make a file that browsers are slow to open; then only some ranks are packed in detail."""
BANDS, COLUMNS = 128, 800
"""The overview's grid."""
TICKS = 2**32 - 1


def write(
    timeline: Timeline, path: str | Path, *, over: Timeline | Sequence[Timeline] = (), unit: str = "s"
) -> None:
    """Write the page; see ``draw``."""
    Path(path).write_text(draw(timeline, over=over, unit=unit), encoding="utf-8")


def draw(timeline: Timeline, *, over: Timeline | Sequence[Timeline] = (), unit: str = "s") -> str:
    """The HTML of a page with the timeline, and below it those it is drawn over on the same time axis.

    ``unit`` as in ``Timeline.save``.
    """
    timelines = stack(timeline, over)
    names = headings(timelines)
    end = max(one.step_time for one in timelines) or 1.0
    causes = [name for name in CAUSES if any(by.get(name, 0.0) > 0 for one in timelines for by in one.idle_by_cause)]
    parts = {
        "title": html.escape(" over ".join(names)),
        "words": "".join(f'<p class="words">{html.escape(words)}</p>' for words in _words(timelines)),
        "numbers": _numbers(names, timelines, unit),
        "tables": "".join(_ranks(name, one, causes) for name, one in zip(names, timelines, strict=True)),
        "style": _asset("page.css"),
        "script": "\n".join(map(_asset, ("data.js", "paint.js", "page.js"))),
        # "<" would end the script element if a name contained "</script>".
        "data": json.dumps(_data(names, timelines, end, unit), separators=(",", ":")).replace("<", "\\u003c"),
    }
    return string.Template(_asset("page.html")).substitute(parts)


def _asset(name: str) -> str:
    return (resources.files("schedules.views") / "assets" / name).read_text(encoding="utf-8")


def _words(timelines: Sequence[Timeline]) -> list[str]:
    first, *others = timelines
    return [shape(first.schedule)] if not others else [first.difference(other).text() for other in others]


# Tables, which are also there for whoever reads no picture.


def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], style: str = "") -> str:
    cells = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in one) + "</tr>" for one in rows
    )
    titles = "".join(f'<th scope="col">{html.escape(title)}</th>' for title in head)
    return (
        f'<div class="scroll"><table class="{style}"><caption>{html.escape(caption)}</caption>'
        f"<thead><tr>{titles}</tr></thead><tbody>{cells}</tbody></table></div>"
    )


def _numbers(names: Sequence[str], timelines: Sequence[Timeline], unit: str) -> str:
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
    return _table(explanation, head, rows, "left")


def _ranks(name: str, timeline: Timeline, causes: Sequence[str]) -> str:
    head = ("rank", "stages", "idle", *causes, "peak activations")
    rows = (
        (
            str(rank),
            ", ".join(map(str, timeline.schedule.stages_of_rank(rank))),
            percent(timeline.idle[rank]),
            *(percent(share) if share else "–" for share in (timeline.idle_by_cause[rank].get(cause, 0.0) for cause in causes)),
            amount(timeline.peak_activations[rank]),
        )
        for rank in range(timeline.schedule.ranks)
    )
    state = " open" if timeline.schedule.ranks <= 16 else ""
    table = _table("Idle time by cause, as a share of the step.", head, rows, "left")
    return f"<details{state}><summary><b>{html.escape(name)}</b>, rank by rank</summary>{table}</details>"


# What the scripts read.


def _data(names: Sequence[str], timelines: Sequence[Timeline], end: float, unit: str) -> dict[str, Any]:
    kinds = {int(kind) for one in timelines for kind in np.unique(one.schedule.actions[:, 1])}
    steps = any(span.track == "step" for one in timelines for span in one.other)
    tracks = {span.track for one in timelines for span in one.other}
    return {
        "unit": unit,
        "end": end,
        "kinds": [
            {"name": look.name, "words": look.words, "colour": look.colour, "used": code in kinds or look.name == "step" and steps}
            for code, look in enumerate(KINDS)
        ],
        "causes": [
            {
                "name": name,
                "words": look.words,
                "colour": look.colour,
                "hatch": look.hatch,
                "used": any(by.get(name, 0.0) > 0 for one in timelines for by in one.idle_by_cause),
            }
            for name, look in CAUSES.items()
        ],
        "later": LATER,
        "tracks": {name: colour for name, colour in TRACKS.items() if name in tracks},
        "timelines": [_timeline(name, one, end) for name, one in zip(names, timelines, strict=True)],
    }


def _timeline(name: str, timeline: Timeline, end: float) -> dict[str, Any]:
    schedule = timeline.schedule
    bubbles = bubbles_by_rank(timeline)
    critical: dict[int, list[int]] = {}
    for span in timeline.critical_path:
        critical.setdefault(span.rank, []).append(span)
    chunks = max(1, schedule.stages_per_rank)
    packed = {
        "title": f"{name} ({timeline.kind})" if name == schedule.name else name,
        "name": schedule.name,
        "ranks": schedule.ranks,
        "step": timeline.step_time,
        "digits": len(str(schedule.micro_batches - 1)),
        "peaks": timeline.peak_activations,
        "shades": [[shade(kind, chunk, chunks) for chunk in range(chunks)] for kind in range(len(KINDS))],
        "rows": [
            _row(timeline, rank, bubbles[rank], critical.get(rank, []), end) for rank in _detailed(timeline)
        ],
    }
    if schedule.ranks > MOST_ROWS:
        bands = min(BANDS, schedule.ranks)
        shares = np.rint(occupancy(timeline, bands, COLUMNS) * 255).clip(0, 255)
        packed["overview"] = {"rows": bands, "columns": COLUMNS, "cells": _packed(shares, "u1")}
    return packed


def _detailed(timeline: Timeline) -> list[int]:
    """The ranks that are packed pass by pass: all, or as many, evenly spread, as the file may hold."""
    ranks, passes = timeline.schedule.ranks, len(timeline.schedule.actions)
    most = max(16, ranks * MOST_PASSES // max(passes, 1))
    return list(range(ranks)) if most >= ranks else np.linspace(0, ranks - 1, most).round().astype(int).tolist()


def _row(timeline: Timeline, rank: int, bubbles: Sequence[Any], critical: Sequence[Span], end: float) -> dict[str, Any]:
    work = row(timeline, rank)
    times, live = timeline.memory(rank)
    causes = list(CAUSES)

    def ticks(values: ArrayLike) -> str:
        return _packed(np.rint(np.clip(np.asarray(values, dtype=np.float64) / end, 0.0, 1.0) * TICKS), "<u4")

    return {
        "rank": rank,
        "idle": timeline.idle[rank],
        "causes": [timeline.idle_by_cause[rank].get(cause, 0.0) for cause in causes],
        "stages": timeline.schedule.stages_of_rank(rank),
        "paired": work.paired,
        "start": ticks(work.start),
        "end": ticks(work.end),
        "kind": _packed(work.kind, "u1"),
        "stage": _packed(work.stage, "<u4"),
        "batch": _packed(work.micro_batch, "<u4"),
        "chunk": _packed(work.chunk, "u1"),
        "bubbles": {
            "start": ticks([bubble.start for bubble in bubbles]),
            "end": ticks([bubble.end for bubble in bubbles]),
            "cause": _packed([causes.index(bubble.cause) for bubble in bubbles], "u1"),
            "waits": ",".join(bubble.waits_for or "" for bubble in bubbles),
        },
        "memory": {"time": ticks(times), "live": _packed(live, "<f4")},
        "extra": [
            {"track": track, "start": ticks([span.start for span in spans]), "end": ticks([span.end for span in spans])}
            for track, spans in beside(timeline, rank).items()
        ],
        "critical": np.flatnonzero(np.isin(work.start, [span.start for span in critical])).tolist(),
    }


def _packed(values: ArrayLike, form: str) -> str:
    return base64.b64encode(np.asarray(values).astype(form).tobytes()).decode()

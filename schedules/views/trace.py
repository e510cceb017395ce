"""A timeline as a trace that ui.perfetto.dev and chrome://tracing open: a process a rank, a thread a track.

Besides the passes it holds the idle stretches with their causes, a counter of live activations, and an arrow for every
message from the pass that produces it to the pass that needs it. Format: "Trace Event Format", Google, object form.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from schedules.action import actions_of
from schedules.causes import CAUSES as NAMES
from schedules.causes import pieces
from schedules.timeline import Timeline
from schedules.views.palette import CAUSES, KINDS
from schedules.views.picture import beside, headings, stack, waited_for

MICROSECONDS = 1e6
MOST_ARROWS = 50_000
"""More arrows than this are left out: they would hide what they connect."""
TRACKS = ("compute", "idle")
WORDS = {look.name: look.words for look in KINDS}
Event = dict[str, Any]


def write(timeline: Timeline, path: str | Path, *, over: Timeline | Sequence[Timeline] = (), unit: str = "s") -> None:
    """Write the trace, one event a line; see ``events``. The format knows no other unit than seconds."""
    with Path(path).open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[')
        separator = "\n"
        for event in events(timeline, over=over):
            file.write(separator + json.dumps(event, separators=(",", ":")))
            separator = ",\n"
        file.write("\n]}\n")


def events(timeline: Timeline, *, over: Timeline | Sequence[Timeline] = ()) -> Iterator[Event]:
    """All events, times in microseconds; a time of a cost model that is only relative counts as seconds.

    The ranks of the timelines it is drawn over have the process numbers after its own, and so stand below.
    """
    timelines = stack(timeline, over)
    first = 0
    for heading, one in zip(headings(timelines), timelines, strict=True):
        for rank in range(one.schedule.ranks):
            process = first + rank
            yield from _names(process, f"{heading} rank {rank}", (*TRACKS, *beside(one, rank)))
            yield from _work(one, rank, process)
            yield from _bubbles(one, rank, process)
            for thread, spans in enumerate(beside(one, rank).values(), start=len(TRACKS)):
                for span in spans:
                    yield _span(process, thread, span.action, span.start, span.end, {})
            yield from _memory(one, rank, process)
        yield from _arrows(one, first)
        first += one.schedule.ranks


def _names(process: int, name: str, tracks: Sequence[str]) -> Iterator[Event]:
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}}
    for thread, track in enumerate(tracks):
        yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": track}}


def _work(timeline: Timeline, rank: int, process: int) -> Iterator[Event]:
    starts, ends = timeline.start[rank].tolist(), timeline.end[rank].tolist()
    for entry, start, end in zip(timeline.schedule.rows[rank], starts, ends, strict=True):
        actions = actions_of(entry)
        details = {
            "pass": " + ".join(WORDS[action.kind] for action in actions),
            "stage": ", ".join(str(action.stage) for action in actions),
            "micro-batch": ", ".join(str(action.micro_batch) for action in actions),
        }
        yield _span(process, 0, " + ".join(map(str, actions)), start, end, details)
    for span in timeline.other:
        if span.rank == rank and span.track == "step":
            yield _span(process, 0, span.action, span.start, span.end, {})


def _bubbles(timeline: Timeline, rank: int, process: int) -> Iterator[Event]:
    found = pieces(timeline, rank)
    columns = (found.start.tolist(), found.end.tolist(), found.cause.tolist(), waited_for(timeline, found.waits_for))
    for start, end, cause, waits_for in zip(*columns, strict=True):
        why = {"why": CAUSES[NAMES[cause]].words, "waits for": waits_for}
        yield _span(process, 1, NAMES[cause], start, end, why)


def _span(process: int, thread: int, name: str, start: float, end: float, details: dict[str, str]) -> Event:
    times = {"ts": start * MICROSECONDS, "dur": (end - start) * MICROSECONDS}
    return {"ph": "X", "pid": process, "tid": thread, "name": name, **times, "args": details}


def _memory(timeline: Timeline, rank: int, process: int) -> Iterator[Event]:
    for time, live in zip(*(values.tolist() for values in timeline.memory(rank)), strict=True):
        value = {"micro-batches": live}
        yield {"ph": "C", "pid": process, "name": "live activations", "ts": time * MICROSECONDS, "args": value}


def _arrows(timeline: Timeline, first: int) -> Iterator[Event]:
    schedule = timeline.schedule
    source, entries = schedule.needs.source, schedule.entries
    to = np.flatnonzero(source >= 0)
    rank = entries.rank[entries.of_action]
    to = to[rank[source[to]] != rank[to]]
    if len(to) > MOST_ARROWS:
        return
    start, end = (np.concatenate(times) for times in (timeline.start, timeline.end))
    for number, (produced, needed) in enumerate(zip(source[to].tolist(), to.tolist(), strict=True)):
        sent, used = entries.of_action[produced], entries.of_action[needed]
        # A flow event belongs to the span that holds its moment; a span's end is no longer in it.
        inside = start[sent] + 0.999 * (end[sent] - start[sent])
        name = f"{first}.{number}"
        for phase, entry, moment in (("s", sent, inside), ("f", used, start[used])):
            event = {"ph": phase, "id": name, "name": "message", "cat": "message", "tid": 0}
            event |= {"pid": first + int(entries.rank[entry]), "ts": float(moment) * MICROSECONDS}
            yield event | {"bp": "e"} if phase == "f" else event

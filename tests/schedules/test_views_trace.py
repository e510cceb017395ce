"""The Perfetto trace: every pass, every idle stretch, memory, and an arrow a message."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from schedules import Costs, Span, Timeline, build, simulate
from schedules.timeline import Timeline as TimelineType

SECOND = 1e6


def events_of(timeline: TimelineType, folder: Path, **options: Any) -> list[dict[str, Any]]:
    timeline.save(folder / "trace.json", **options)
    return list(json.loads((folder / "trace.json").read_text())["traceEvents"])


def test_spans_of_a_rank_fill_the_step(tmp_path: Path) -> None:
    timeline = simulate(build("1f1b", ranks=4, micro_batches=8), Costs(hop=0.2))
    lasted: dict[tuple[int, int], float] = defaultdict(float)
    for event in events_of(timeline, tmp_path):
        if event["ph"] == "X":
            lasted[event["pid"], event["tid"]] += event["dur"] / SECOND
    for rank in range(4):
        assert lasted[rank, 0] == pytest.approx(timeline.busy[rank])
        assert lasted[rank, 1] == pytest.approx(timeline.step_time - timeline.busy[rank])


def test_memory_is_a_counter_of_every_rank(tmp_path: Path) -> None:
    timeline = simulate(build("1f1b", ranks=3, micro_batches=5))
    peaks: dict[int, float] = defaultdict(float)
    for event in events_of(timeline, tmp_path):
        if event["ph"] == "C":
            peaks[event["pid"]] = max(peaks[event["pid"]], event["args"]["micro-batches"])
    assert tuple(peaks[rank] for rank in range(3)) == timeline.peak_activations == (3, 2, 1)


def test_every_message_is_an_arrow_from_its_pass_to_the_one_that_needs_it(tmp_path: Path) -> None:
    timeline = simulate(build("gpipe", ranks=3, micro_batches=4), Costs(hop=0.5))
    found = events_of(timeline, tmp_path)
    starts, ends = ({event["id"]: event for event in found if event["ph"] == phase} for phase in "sf")
    assert len(starts) == len(ends) == 2 * 2 * 4  # boundaries x directions x micro-batches
    passes = [event for event in found if event["ph"] == "X" and event["tid"] == 0]
    for name, event in starts.items():
        (source,) = (one for one in passes if one["pid"] == event["pid"] and 0 < event["ts"] - one["ts"] < one["dur"])
        (target,) = (one for one in passes if one["pid"] == ends[name]["pid"] and one["ts"] == ends[name]["ts"])
        assert source["args"]["micro-batch"] == target["args"]["micro-batch"]
        assert abs(source["pid"] - target["pid"]) == 1


def test_ranks_of_a_second_timeline_are_processes_of_their_own(tmp_path: Path) -> None:
    predicted = simulate(build("1f1b", ranks=2, micro_batches=2))
    other = [Span(0, "step", "STEP", 9.0, 9.5), Span(1, "reduce", "REDUCE_GRAD 1", 8.0, 9.0)]
    measured = Timeline.measured(predicted.schedule, predicted.start, predicted.end, other=other)
    found = events_of(predicted, tmp_path, over=measured)
    names = {event["pid"]: event["args"]["name"] for event in found if event["name"] == "process_name"}
    assert names == {
        0: "predicted 1f1b rank 0", 1: "predicted 1f1b rank 1", 2: "measured 1f1b rank 0", 3: "measured 1f1b rank 1",
    }  # fmt: skip
    tracks = [event["args"]["name"] for event in found if event["name"] == "thread_name" and event["pid"] == 3]
    assert tracks == ["compute", "idle", "reduce"]
    assert any(event["name"] == "STEP" and event["pid"] == 2 and event["dur"] == 0.5 * SECOND for event in found)

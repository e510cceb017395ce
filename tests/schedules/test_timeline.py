"""What a timeline says about a step: busy and idle, why, memory, the critical path, and what changed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import Action, Costs, Entry, Pair, Schedule, Span, Timeline, build, simulate
from schedules.action import actions_of
from schedules.causes import CAUSES
from schedules.errors import StampError, UnknownFormat
from tests.schedules.pictures import rows
from tests.schedules.strategies import legal_schedules


def shares(timeline: Timeline, rank: int) -> dict[str, float]:
    """Units of time that a rank loses to each cause it loses any to."""
    lost = {cause: share * timeline.step_time for cause, share in timeline.idle_by_cause[rank].items()}
    return {cause: round(time, 9) for cause, time in lost.items() if time > 1e-9}


def late(schedule: Schedule, costs: Costs, by: float, entries: Sequence[str]) -> Timeline:
    """A measured step in which some entries begin late although all they need is there."""
    free = [0.0] * schedule.ranks
    end: dict[Entry, float] = {}
    starts: list[list[float]] = [[] for _ in range(schedule.ranks)]
    ends: list[list[float]] = [[] for _ in range(schedule.ranks)]
    graph, kinds = schedule.graph(), costs.by_kind(schedule.num_stages)
    for entry in networkx.topological_sort(graph):
        rank = graph.nodes[entry]["rank"]
        messages = [u for u, _, kind in graph.in_edges(entry, data="kind") if kind == "message"]
        start = max([free[rank], *(end[u] + costs.hop for u in messages)]) + by * (str(entry) in entries)
        (action,) = actions_of(entry)
        end[entry] = free[rank] = start + float(kinds["FBIW".index(action.kind), action.stage])
        starts[rank].append(start)
        ends[rank].append(end[entry])
    return Timeline.measured(schedule, starts, ends, hop=costs.hop)


def test_busy_idle_and_both_bubbles() -> None:
    timeline = simulate(build("1f1b", ranks=4, micro_batches=8))
    assert timeline.step_time == 33
    assert timeline.busy == (24, 24, 24, 24)
    assert timeline.idle == pytest.approx([9 / 33] * 4)
    assert timeline.bubble == timeline.span_bubble == pytest.approx(9 / 33)
    forward = simulate(build("forward-only", ranks=4, micro_batches=8))
    assert forward.bubble == pytest.approx(3 / 11), "between a common start and a common end"
    assert forward.span_bubble == pytest.approx(0), "every rank by itself is never idle"


def test_warm_up_and_drain() -> None:
    timeline = simulate(build("1f1b", ranks=4, micro_batches=8))
    assert [shares(timeline, rank) for rank in range(4)] == [
        {"warm-up": 6, "drain": 3},
        {"warm-up": 5, "drain": 4},
        {"warm-up": 4, "drain": 5},
        {"warm-up": 3, "drain": 6},
    ]
    forward = simulate(build("forward-only", ranks=3, micro_batches=5))
    assert [shares(forward, rank) for rank in range(3)] == [{"drain": 2}, {"warm-up": 1, "drain": 1}, {"warm-up": 2}]


def test_a_slow_stage_makes_the_others_wait_and_not_itself() -> None:
    """Stage 2 takes half as long again: in the steady state everybody else waits 1.5 of every 4.5 units for it."""
    times = [1, 1, 1.5, 1]
    costs = Costs(F=times, I=times, W=times)
    timeline = simulate(build("1f1b", ranks=4, micro_batches=16), costs)
    idle = [by["imbalance"] * timeline.step_time for by in timeline.idle_by_cause]
    assert idle[2] == 0
    assert min(idle[0], idle[1], idle[3]) > 21
    assert all(by["dependency"] == 0 for by in timeline.idle_by_cause)
    rank_3 = [bubble for bubble in timeline.bubbles if bubble.rank == 3 and bubble.cause == "imbalance"]
    assert {bubble.waits_for for bubble in rank_3[:-1]} <= {f"2F{number}" for number in range(16)}


def test_latency_is_the_links_fault() -> None:
    timeline = simulate(build("gpipe", ranks=3, micro_batches=1), Costs(hop=0.25))
    assert [shares(timeline, rank) for rank in range(3)] == [
        {"warm-up": 6, "link": 1.0},
        {"warm-up": 4, "drain": 2, "link": 1.0},
        {"warm-up": 2, "drain": 4, "link": 1.0},
    ]
    assert [tuple(bubble) for bubble in timeline.bubbles if bubble.rank == 1] == [
        (1, 0.0, 1.0, "warm-up", "0F0"),
        (1, 1.0, 1.25, "link", "0F0"),
        (1, 2.25, 5.25, "warm-up", "2B0"),
        (1, 5.25, 5.75, "link", "2B0"),
        (1, 7.75, 9.75, "drain", "0B0"),
        (1, 9.75, 10.0, "link", "0B0"),
    ]


def test_what_nothing_explains_is_the_hosts_fault() -> None:
    schedule = build("gpipe", ranks=2, micro_batches=2)
    timeline = late(schedule, Costs(hop=0.25), by=0.5, entries=["0F0", "1F1"])
    assert timeline.kind == "measured"
    # Both ranks lose the half second before 0F0, which rank 1 waits for, and the one before 1F1, for rank 0.
    assert shares(timeline, 0) == {"warm-up": 3.25, "link": 0.25, "host": 1.0}
    assert shares(timeline, 1) == {"warm-up": 1, "drain": 2.25, "link": 0.25, "host": 1.0}
    assert timeline.bubbles[0] == (0, 0.0, 0.5, "host", None)


def test_reductions_and_steps_behind_the_last_pass() -> None:
    schedule = build("gpipe", ranks=2, micro_batches=1)
    predicted = simulate(schedule)
    other = (
        Span(1, "reduce", "REDUCE_GRAD 1", 4.0, 5.0),  # while rank 0 still computes: nobody waits for it
        Span(0, "reduce", "REDUCE_GRAD 0", 6.0, 8.0),
        Span(0, "step", "STEP", 8.0, 9.0),
        Span(1, "step", "STEP", 5.0, 5.5),
    )
    timeline = Timeline.measured(schedule, predicted.start, predicted.end, other=other)
    assert timeline.step_time == 9
    assert timeline.busy == (4, 3.5)
    assert shares(timeline, 0) == {"warm-up": 3, "reduction": 2}
    assert shares(timeline, 1) == {"warm-up": 1, "drain": 1.5, "reduction": 2, "imbalance": 1}
    assert timeline.spans[-4:] == other


@given(legal_schedules(), st.integers(0, 1000), st.booleans())
@settings(max_examples=150)
def test_every_idle_moment_has_exactly_one_cause(schedule: Schedule, seed: int, measured: bool) -> None:
    random = np.random.default_rng(seed)
    f, i, w = random.uniform(0.1, 2.0, (3, schedule.num_stages)).tolist()
    timeline = simulate(schedule, Costs(F=f, I=i, W=w, hop=float(random.choice([0.0, 0.3]))))
    if measured:
        # Stretched step by step, as a busy machine would, with a step of the optimizer at the end of each rank.
        late = [np.cumsum(random.uniform(0, 0.2, 2 * len(row))) for row in timeline.start]
        starts = [row + gap[::2] for row, gap in zip(timeline.start, late, strict=True)]
        ends = [row + gap[1::2] for row, gap in zip(timeline.end, late, strict=True)]
        done = [float(row.max(initial=0.0)) for row in ends]
        steps = [Span(rank, "step", "STEP", end + 0.1, end + 0.3) for rank, end in enumerate(done)]
        reduces = [Span(rank, "reduce", "REDUCE_GRAD", end, end + 0.1) for rank, end in enumerate(done)]
        timeline = Timeline.measured(schedule, starts, ends, other=(*steps, *reduces), hop=timeline.hop)
    for rank, by in enumerate(timeline.idle_by_cause):
        assert list(by) == list(CAUSES)
        assert min(by.values()) >= -1e-12
        assert sum(by.values()) == pytest.approx(timeline.idle[rank], abs=1e-9)
        found = [bubble for bubble in timeline.bubbles if bubble.rank == rank]
        assert sum(one.end - one.start for one in found) == pytest.approx(timeline.idle[rank] * timeline.step_time)
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(found))
    if timeline.kind == "predicted":
        assert all(by["host"] == pytest.approx(0) for by in timeline.idle_by_cause)


def test_memory_over_time() -> None:
    times, live = simulate(build("1f1b", ranks=2, micro_batches=3)).memory(0)
    assert [(t, n) for t, n in zip(times, live, strict=True) if t][:6] == [
        (1, 1), (1, 2), (2, 2), (4, 2), (6, 1), (6, 2),
    ]  # fmt: skip
    assert live[-1] == 0
    split = simulate(Schedule.from_rows("split", rows("0F0 0I0 0F1 0W0 0I1 0W1"), [0]))
    assert split.peak_activations == (2,), "kept until W"
    half = simulate(build("gpipe", ranks=1, micro_batches=3, stages_per_rank=2))
    assert half.memory(0)[1].max() == 3.0
    assert half.memory(0)[1][1] == 0.5, "a micro-batch on one of two stages"


def test_two_copies_of_a_stage_are_two_whole_stages() -> None:
    both_ways = Schedule.from_rows(
        "both-ways", rows("0F0 3F1 3B1 0B0 \n 2F1 1F0 1B0 2B1"), [0, 1, 1, 0],
        routes=[(0, 1), (2, 3)], layer_group_of_stage=[0, 1, 0, 1],
    )  # fmt: skip
    assert simulate(both_ways).peak_activations == (2, 2)


def test_a_pair_holds_both_activations() -> None:
    pair = Pair(Action.parse("0B0"), Action.parse("0F1"))
    schedule = Schedule.from_rows("pair", [[Action.parse("0F0"), pair, Action.parse("0B1")]], [0])
    timeline = simulate(schedule)
    assert timeline.peak_activations == (2,)
    assert timeline.step_time == 1 + 3 + 2
    assert timeline.spans[1] == Span(0, "compute", "(0B0;0F1)OVERLAP_F_B", 1.0, 4.0)


def test_the_critical_path_has_no_hole() -> None:
    timeline = simulate(build("1f1b", ranks=3, micro_batches=4), Costs(F=[1, 2, 1], I=1, W=1))
    path = timeline.critical_path
    assert path[0].start == 0
    assert path[-1].end == timeline.step_time
    assert all(a.end == b.start for a, b in pairwise(path))
    assert [span.action for span in path][:3] == ["0F0", "1F0", "2F0"]


def test_differences_in_words() -> None:
    one = simulate(build("1f1b", ranks=4, micro_batches=8))
    two = simulate(build("interleaved-1f1b", ranks=4, micro_batches=8), Costs(0.5, 0.5, 0.5))
    difference = one.difference(two)
    assert difference.step_time == pytest.approx(-4.5)
    assert difference.ratio == pytest.approx(28.5 / 33)
    assert difference.text() == (
        "Interleaved-1f1b takes 13.6 % less time than 1f1b; its bubble is 15.8 % of the step instead of 27.3 %. "
        "Idle time by cause: warm-up 13.6 % to 5.3 %, drain 13.6 % to 10.1 %, dependency 0.0 % to 0.4 %. "
        "The fullest rank holds activations of 5.5 micro-batches instead of 4."
    )
    assert one.difference(one).text() == (
        "The second step takes as long as the first step; its bubble is 27.3 %, as before."
    )


def test_a_slow_stage_is_named_when_prediction_and_measurement_differ() -> None:
    schedule = build("1f1b", ranks=2, micro_batches=4)
    slower = simulate(schedule, Costs(F=[1, 1.5]))
    measured = Timeline.measured(schedule, slower.start, slower.end)
    text = simulate(schedule).difference(measured).text()
    assert text.startswith("The measured step takes 13.3 % longer than the predicted step")
    assert "1F changes most, by 50.0 % more." in text
    assert simulate(schedule).difference(measured).passes["1F"] == pytest.approx((1.0, 1.5))


def test_spans_are_made_on_access() -> None:
    timeline = simulate(build("gpipe", ranks=2, micro_batches=1))
    assert timeline.spans == (
        Span(0, "compute", "0F0", 0, 1),
        Span(0, "compute", "0B0", 4, 6),
        Span(1, "compute", "1F0", 1, 2),
        Span(1, "compute", "1B0", 2, 4),
    )
    assert timeline.span(3) == timeline.spans[3]


def test_stamps_must_match_the_rows() -> None:
    schedule = build("gpipe", ranks=2, micro_batches=1)
    with pytest.raises(StampError, match=r"ends has \[2, 1\] stamps a rank, the rows have \[2, 2\] entries"):
        Timeline.measured(schedule, [[0, 1], [0, 1]], [[1, 2], [1]])


def test_an_unknown_ending_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(UnknownFormat, match=r"cannot save a timeline as 'x.pdf'; let the name end in one of .html"):
        simulate(build("gpipe", ranks=1, micro_batches=1)).save(tmp_path / "x.pdf")
    assert list(tmp_path.iterdir()) == []


def test_threads_that_save_under_one_name_leave_a_whole_file(tmp_path: Path) -> None:
    timeline = simulate(build("1f1b", ranks=2, micro_batches=2), Costs())
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(timeline.save, tmp_path / "step.json") for _ in range(12)]:
            done.result()
    assert [path.name for path in tmp_path.iterdir()] == ["step.json"]
    assert json.loads((tmp_path / "step.json").read_text())

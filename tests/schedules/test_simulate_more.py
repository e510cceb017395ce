"""Costs beyond passes and hops: bytes on links, ranks of other speed, what replicas share, bytes of memory."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import Costs, Program, Schedule, Span, Timeline, build, lower, prove, simulate
from schedules.causes import CAUSES
from schedules.errors import CostError
from schedules.program import CODE, Op
from tests.schedules.pictures import rows
from tests.schedules.strategies import legal_schedules


def shares(timeline: Timeline, rank: int) -> dict[str, float]:
    """Units of time that a rank loses to each cause it loses any to."""
    lost = {cause: share * timeline.step_time for cause, share in timeline.idle_by_cause[rank].items()}
    return {cause: round(time, 9) for cause, time in lost.items() if time > 1e-9}


def inserted(program: Program, rank: int, place: int, op: Op, stage: int) -> Program:
    """The program with one instruction more in the row of a rank."""
    at = program.row_starts[rank] + place
    table = np.insert(program.instructions, at, [CODE[op], stage, -1], axis=0).astype(np.int32)
    starts = tuple(start + (number > rank) for number, start in enumerate(program.row_starts))
    return dataclasses.replace(program, instructions=table, row_starts=starts)


def test_bytes_take_their_time() -> None:
    """Outputs of 6 bytes forward, gradients of the same 6 back; 0.25 to get going, 2 a unit of time."""
    schedule = Schedule.from_rows("one", rows("0F0 0B0 \n 1F0 1B0 \n 2F0 2B0"), [0, 1, 2])
    timeline = simulate(schedule, Costs(F=1, I=1, W=1, hop=0.25, bandwidth=2.0, output_bytes=[6, 1, 100]))
    there = [0, 1 + 3.25, 5.25 + 0.75]
    assert [float(start[0]) for start in timeline.start] == there
    back = [float(start[1]) for start in timeline.start]
    assert back == [9.75 + 2 + 3.25, 9 + 0.75, 7.0]
    assert shares(timeline, 2) == {"warm-up": 2, "link": 4 + 4, "drain": 4}


def test_messages_on_one_link_wait_for_each_other() -> None:
    forward = build("forward-only", ranks=2, micro_batches=3)
    costs = Costs(F=1.0, hop=0.5, bandwidth=1.0, output_bytes=2.0)
    apart = simulate(forward, costs)
    assert apart.start[1].tolist() == [3.5, 4.5, 5.5]
    assert not apart.other
    behind = simulate(forward, dataclasses.replace(costs, contention=True))
    assert behind.start[1].tolist() == [3.5, 5.5, 7.5]
    assert behind.other == (
        Span(0, "link", "0F0 to 1", 1, 3), Span(0, "link", "0F1 to 1", 3, 5), Span(0, "link", "0F2 to 1", 5, 7),
    )  # fmt: skip
    assert shares(behind, 1) == {"warm-up": 1, "link": 4.5}
    assert shares(behind, 0) == {"link": 4.5, "drain": 1}


def test_both_directions_of_a_link_are_apart() -> None:
    """1F1B sends outputs one way and gradients the other; a loop of two ranks sends both on both links."""
    costs = Costs(F=1.0, I=0.5, W=0.5, bandwidth=1.0, output_bytes=0.9)
    contended = dataclasses.replace(costs, contention=True)
    line = build("1f1b", ranks=2, micro_batches=6)
    assert simulate(line, contended).step_time == pytest.approx(simulate(line, costs).step_time)
    loop = build("breadth-first", ranks=2, micro_batches=6, stages_per_rank=2)
    slow = {"F": 0.5, "I": 0.25, "W": 0.25}
    assert (
        simulate(loop, dataclasses.replace(contended, **slow)).step_time
        > simulate(loop, dataclasses.replace(costs, **slow)).step_time
    )


@given(legal_schedules(), st.integers(0, 1000))
@settings(max_examples=100)
def test_a_contended_link_carries_one_message_at_a_time(schedule: Schedule, seed: int) -> None:
    random = np.random.default_rng(seed)
    costs = Costs(
        F=1.0, hop=0.1, bandwidth=1.0, output_bytes=random.uniform(0.1, 2, schedule.num_stages), contention=True,
    )  # fmt: skip
    timeline = simulate(schedule, costs)
    free = simulate(schedule, dataclasses.replace(costs, contention=False))
    assert timeline.step_time >= free.step_time - 1e-9
    for end, soonest in zip(timeline.end, free.end, strict=True):
        assert np.all(end >= soonest - 1e-9)
    until: dict[tuple[int, str], float] = {}
    for span in timeline.other:
        link = span.rank, span.action.split()[-1]
        assert span.start >= until.get(link, 0.0) - 1e-9
        until[link] = span.end
    for rank, by in enumerate(timeline.idle_by_cause):
        assert sum(by.values()) == pytest.approx(timeline.idle[rank], abs=1e-9)
        assert by["host"] == pytest.approx(0)


def test_a_slow_rank() -> None:
    schedule = build("1f1b", ranks=4, micro_batches=16)
    slow_rank = simulate(schedule, Costs(speed=[1, 1, 1 / 1.5, 1]))
    slow_stage = simulate(schedule, Costs(F=[1, 1, 1.5, 1], I=[1, 1, 1.5, 1], W=[1, 1, 1.5, 1]))
    assert slow_rank.step_time == pytest.approx(slow_stage.step_time)
    assert slow_rank.idle_by_cause[2]["imbalance"] == pytest.approx(0)
    with pytest.raises(
        CostError, match=r"Costs.speed has 2 numbers, the schedule has 4 ranks; give one number for all"
    ):
        simulate(schedule, Costs(speed=[1, 2]))
    with pytest.raises(CostError, match="a rank's speed must be above 0"):
        Costs(speed=[1, 0])
    for wrong in (0, -1, math.nan, "fast", None):
        with pytest.raises(CostError, match=r"Costs.bandwidth is .*; it must be a number of bytes a second above 0"):
            Costs(bandwidth=wrong)  # type: ignore[arg-type]


def test_reductions_go_on_beside_the_passes_and_steps_come_last() -> None:
    schedule = build("interleaved-1f1b", ranks=2, micro_batches=2, stages_per_rank=2)
    timeline = simulate(schedule, Costs(reduce=[1, 2, 3, 4], step=[0.5, 1.5]))
    expected = simulate(schedule)
    assert [row.tolist() for row in timeline.start] == [row.tolist() for row in expected.start]
    done = {str(entry): float(end) for row, ends in zip(schedule.rows, timeline.end, strict=True)
            for entry, end in zip(row, ends, strict=True)}  # fmt: skip
    assert timeline.other == (
        Span(0, "reduce", "REDUCE_GRAD 2", done["2B1"], done["2B1"] + 3),
        Span(0, "reduce", "REDUCE_GRAD 0", done["0B1"], done["0B1"] + 1),
        Span(1, "reduce", "REDUCE_GRAD 3", done["3B1"], done["3B1"] + 4),
        Span(1, "reduce", "REDUCE_GRAD 1", done["3B1"] + 4, done["3B1"] + 6),
        Span(0, "step", "STEP", done["0B1"] + 1, done["0B1"] + 1.5),
        Span(1, "step", "STEP", done["0B1"] + 1, done["0B1"] + 2.5),
    )
    assert timeline.step_time == done["0B1"] + 2.5
    assert shares(timeline, 0)["reduction"] == 1
    assert shares(timeline, 0)["imbalance"] == 1, "the other rank's step is longer"
    assert shares(timeline, 1)["reduction"] == 1
    assert timeline.busy == (12.5, 13.5)


def test_passes_wait_until_their_parameters_are_whole() -> None:
    program = lower(build("1f1b", ranks=2, micro_batches=2))
    for rank in range(2):
        program = inserted(program, rank, 0, Op.UNSHARD, rank)
    prove(program)
    timeline = simulate(program, Costs(unshard=[2, 6]))
    assert timeline.other == (Span(0, "reduce", "UNSHARD 0", 0, 2), Span(1, "reduce", "UNSHARD 1", 0, 6))
    assert [row[0] for row in timeline.start] == [2, 6]
    assert shares(timeline, 0) == {"reduction": 2 + 2, "warm-up": 3, "drain": 1}, "its own, and then that of rank 1"
    assert shares(timeline, 1) == {"reduction": 2 + 3, "warm-up": 1, "drain": 2}, "that of rank 0, and then its own"
    assert simulate(program).step_time == simulate(program.schedule).step_time, "nothing that takes no time is drawn"


def test_parameters_are_made_whole_again_while_others_are_in_use() -> None:
    """Stage 0 is let go after its forward and gathered behind the forward of stage 1, beside the backward of that."""
    program = lower(Schedule.from_rows("fold", rows("0F0 1F0 1B0 0B0"), [0, 0]))
    row = [str(one) for one in program.rows[0]]
    program = inserted(program, 0, row.index("1F0") + 1, Op.UNSHARD, 0)
    program = inserted(program, 0, row.index("0F0") + 1, Op.RESHARD, 0)
    assert [str(one) for one in program.rows[0]] == [
        "0F0", "RESHARD 0", "1F0", "UNSHARD 0", "1B0", "REDUCE_GRAD 1", "0B0", "REDUCE_GRAD 0", "STEP",
    ]  # fmt: skip
    hidden, late = (simulate(program, Costs(unshard=seconds)) for seconds in (1.5, 5.0))
    assert hidden.start[0].tolist() == [0, 1, 2, 4]
    assert late.start[0].tolist() == [0, 1, 2, 7]
    assert shares(late, 0) == {"reduction": 3}


@given(legal_schedules(), st.integers(0, 1000))
@settings(max_examples=100)
def test_idle_time_has_its_causes_whatever_there_is_beside_passes(schedule: Schedule, seed: int) -> None:
    random = np.random.default_rng(seed)
    per_stage = {name: random.uniform(0, 2, schedule.num_stages) for name in ("F", "unshard", "reshard", "reduce")}
    costs = Costs(**per_stage, step=random.uniform(0, 2, schedule.ranks), hop=0.1)
    program = lower(schedule)
    for rank in range(schedule.ranks):
        for stage in schedule.stages_of_rank(rank):
            place = int(random.integers(len(program.table(rank)) + 1))
            program = inserted(program, rank, place, Op.UNSHARD, stage)
            program = inserted(program, rank, int(random.integers(place + 1)), Op.RESHARD, stage)
    timeline = simulate(program, costs)
    assert (
        timeline.step_time
        >= simulate(schedule, dataclasses.replace(costs, unshard=0, reshard=0, reduce=0, step=0)).step_time
    )
    for rank, by in enumerate(timeline.idle_by_cause):
        assert list(by) == list(CAUSES)
        assert min(by.values()) >= -1e-12
        assert by["host"] == pytest.approx(0)
        assert sum(by.values()) == pytest.approx(timeline.idle[rank], abs=1e-9)


def test_memory_in_bytes() -> None:
    split = Schedule.from_rows("split", rows("0F0 0F1 0I0 0W0 0I1 0W1"), [0])
    timeline = simulate(split, Costs(activation_bytes=10, weight_grad_bytes=4))
    times, live = timeline.memory_bytes(0)
    assert [(t, n) for t, n in zip(times.tolist(), live.tolist(), strict=True)] == [
        (0, 0), (0, 10), (1, 10), (1, 20), (2, 20), (2, 20), (3, 14), (3, 14), (4, 10), (4, 10), (5, 4), (5, 4), (6, 0),
    ]  # fmt: skip
    assert timeline.peak_bytes == (20,)
    assert timeline.peak_activations == (2,)
    whole = simulate(build("1f1b", ranks=2, micro_batches=4), Costs(activation_bytes=[3, 5], weight_grad_bytes=[1, 2]))
    assert whole.peak_bytes == (6, 5)
    forward = simulate(build("forward-only", ranks=2, micro_batches=4), Costs(activation_bytes=[3, 5]))
    assert forward.peak_bytes == (3, 5)
    with pytest.raises(CostError, match="this timeline knows no bytes"):
        Timeline.measured(split, timeline.start, timeline.end).memory_bytes(0)

"""What all views draw from: rows as arrays, occupancy, memory as a line, numbers in words."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules import Costs, Schedule, Span, Timeline, build, simulate
from schedules.causes import CAUSES as CAUSE_NAMES
from schedules.views import palette, picture
from tests.schedules.strategies import legal_schedules


def test_every_cause_has_a_look_of_its_own() -> None:
    assert tuple(palette.CAUSES) == CAUSE_NAMES
    for column in ("hatch", "glyph", "ascii"):
        assert len({getattr(look, column) for look in palette.CAUSES.values()}) == len(CAUSE_NAMES)


def test_optimizer_steps_stand_in_the_row_in_order_of_time() -> None:
    schedule = build("1f1b", ranks=1, micro_batches=1)
    other = [Span(0, "step", "STEP", 1.0, 1.5), Span(0, "reduce", "REDUCE_GRAD 0", 0.5, 0.9)]
    timeline = Timeline.measured(schedule, [[0.0, 2.0]], [[1.0, 3.0]], other=other)
    row = picture.row(timeline, 0)
    assert row.start.tolist() == [0.0, 1.0, 2.0]
    assert [palette.KINDS[kind].name for kind in row.kind] == ["F", "step", "B"]
    assert list(picture.beside(timeline, 0)) == ["reduce"]


@given(legal_schedules(), st.integers(1, 4), st.integers(1, 50))
def test_occupancy_adds_up_to_busy_time(schedule: Schedule, bands: int, columns: int) -> None:
    timeline = simulate(schedule, Costs(hop=0.3))
    bands = min(bands, schedule.ranks)
    cells = picture.occupancy(timeline, bands, columns)
    assert cells.shape == (bands, columns, len(palette.KINDS))
    assert cells.sum(axis=2).max() <= 1 + 1e-9
    of_rank = np.arange(schedule.ranks) * bands // schedule.ranks
    for band in range(bands):
        busy = [timeline.busy[rank] for rank in np.flatnonzero(of_rank == band)]
        assert cells[band].sum() / columns == pytest.approx(np.mean(busy) / timeline.step_time)


@given(legal_schedules())
def test_the_memory_line_reaches_the_peak_and_ends_with_the_step(schedule: Schedule) -> None:
    timeline = simulate(schedule)
    for rank, peak in enumerate(timeline.peak_activations):
        times, live = picture.memory_steps(timeline, rank, timeline.step_time / 1000)
        assert live.max() == pytest.approx(peak)
        assert np.all(np.diff(times) >= 0)
        assert times[-1] == timeline.step_time


def test_memory_has_no_notch_where_one_pass_takes_what_another_frees() -> None:
    timeline = simulate(build("1f1b", ranks=1, micro_batches=3))
    _, live = picture.memory_steps(timeline, 0, 0.01)
    assert live[1:-2].min() == 1.0


def test_headings_tell_apart() -> None:
    one, two, other = (
        simulate(build(name, ranks=2, micro_batches=4, stages_per_rank=stages))
        for name, stages in (("interleaved-1f1b", 2), ("interleaved-1f1b", 3), ("gpipe", 1))
    )
    measured = Timeline.measured(one.schedule, one.start, one.end)
    assert picture.headings([one, other]) == ("interleaved-1f1b", "gpipe")
    assert picture.headings([one, two]) == ("interleaved-1f1b, 2 stages a rank", "interleaved-1f1b, 3 stages a rank")
    assert picture.headings([one, measured]) == ("predicted interleaved-1f1b", "measured interleaved-1f1b")
    assert picture.headings([one, one]) == ("predicted interleaved-1f1b (1)", "predicted interleaved-1f1b (2)")


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (0.0, "s", "0 s"),
        (0.02, "s", "20 ms"),
        (0.00123456, "s", "1.235 ms"),
        (4e-6, "s", "4 µs"),
        (33.0, "", "33"),
        (27.272727, "", "27.27"),
        (123456.0, "", "123456"),
        (0.00001234, "", "0.00001234"),
    ],
)
def test_times_are_written_as_people_do(value: float, unit: str, words: str) -> None:
    assert picture.duration(value, unit) == words


def test_marks_are_round() -> None:
    assert picture.marks(33.0, 6) == [0, 10, 20, 30]
    assert picture.marks(0.69, 8) == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert picture.marks(0.0, 8) == [0.0]


def test_shapes_are_said_in_words() -> None:
    assert picture.shape(build("1f1b", ranks=1, micro_batches=1)) == "1 rank, 1 micro-batch"
    shape = picture.shape(build("interleaved-1f1b", ranks=4, micro_batches=8, stages_per_rank=3))
    assert shape == "4 ranks, 8 micro-batches, 3 stages a rank"

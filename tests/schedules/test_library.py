"""Every schedule that comes with the package: its picture, its closed form, its promises, published numbers."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules import Costs, Schedule, build, facts, lower, names, simulate
from tests.schedules.pictures import draw
from tests.schedules.strategies import shapes

REFERENCE = json.loads(Path(__file__).with_name("reference.json").read_text(encoding="utf-8"))["rows"]
LIBRARY = ("1f1b", "forward-only", "gpipe", "interleaved-1f1b")


def make(name: str, ranks: int, stages_per_rank: int, micro_batches: int) -> Schedule:
    """The schedule with as many stages a rank as it may have."""
    number = stages_per_rank if facts(name).stages_per_rank.allow(stages_per_rank) else None
    return build(name, ranks=ranks, micro_batches=micro_batches, stages_per_rank=number)


def step_time(schedule: Schedule, forward: float, backward: float) -> float:
    """The closed form of all four, by the times of a rank's whole share: groups of micro-batches, pushed through
    v times, the last of them followed by the way through the other ranks."""
    p, v, m = schedule.ranks, schedule.stages_per_rank, schedule.micro_batches
    passes = (v - 1) * max(m, p) + m + p - 1
    return passes * (forward if schedule.forward_only else forward + backward) / v


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("1f1b", [(4, 6, 1)]),
        ("gpipe", [(4, 4, 1), (2, 4, 2)]),
        ("forward-only", [(4, 4, 2)]),
        ("interleaved-1f1b", [(4, 4, 2)]),
    ],
)
def test_the_docstring_draws_what_runs(name: str, shapes: list[tuple[int, int, int]]) -> None:
    for ranks, micro_batches, stages_per_rank in shapes:
        schedule = build(name, ranks=ranks, micro_batches=micro_batches, stages_per_rank=stages_per_rank)
        shown = "\n".join(line.strip() for line in facts(name).picture.splitlines())
        assert draw(schedule) in shown


def test_more_micro_batches_than_a_group_and_not_a_multiple() -> None:
    schedule = build("interleaved-1f1b", ranks=2, micro_batches=5, stages_per_rank=2)
    expected = """\
rank 0 | 0 1 2 0'1'2'. aaa'3 bbb'4 ccc'3'aaa 4'bbb . ccc . ddd'eee'ddd eee
rank 1 | . 0 1 2 0'aaa'1'bbb'2'ccc'3 aaa 4 bbb 3'ccc 4'ddd'eee'ddd eee . ."""
    assert draw(schedule) == expected


@pytest.mark.parametrize("name", LIBRARY)
@given(
    shape=shapes(),
    forward=st.sampled_from([0.5, 1.0, 3.0]),
    backward=st.sampled_from([(0.25, 0.25), (1.0, 1.0), (2.0, 0.5)]),
)
def test_step_time_bubble_and_peak_have_a_closed_form(
    name: str, shape: tuple[int, int, int], forward: float, backward: tuple[float, float]
) -> None:
    schedule = make(name, *shape)
    p, v, m = schedule.ranks, schedule.stages_per_rank, schedule.micro_batches
    timeline = simulate(schedule, Costs(F=forward / v, I=backward[0] / v, W=backward[1] / v))
    expected = step_time(schedule, forward, sum(backward))
    work = m * (forward if schedule.forward_only else forward + sum(backward))
    assert timeline.step_time == pytest.approx(expected)
    assert timeline.idle == pytest.approx([1 - work / expected] * p)
    assert timeline.bubble == pytest.approx(1 - work / expected)
    assert max(timeline.peak_activations) == pytest.approx(facts(name).peak(p, v, m))


@given(st.integers(1, 8), st.integers(1, 40))
def test_peaks_of_every_rank(p: int, m: int) -> None:
    one = simulate(build("1f1b", ranks=p, micro_batches=m)).peak_activations
    assert one == tuple(min(p - rank, m) for rank in range(p))
    assert simulate(build("gpipe", ranks=p, micro_batches=m)).peak_activations == (m,) * p
    if m % p == 0:
        two = simulate(build("interleaved-1f1b", ranks=p, micro_batches=m, stages_per_rank=2)).peak_activations
        assert two == tuple(min((p + 2 * (p - 1 - rank) + 1) / 2, m) for rank in range(p))


@pytest.mark.parametrize("name", LIBRARY)
@given(shapes())
def test_every_shape_is_complete_legal_and_runs(name: str, shape: tuple[int, int, int]) -> None:
    schedule = make(name, *shape)  # checked inside
    p, v, m = schedule.ranks, schedule.stages_per_rank, schedule.micro_batches
    assert len(schedule.actions) == p * v * m * (1 if schedule.forward_only else 2)
    assert schedule.ordered
    lower(schedule)  # proved inside
    timeline = simulate(schedule)
    assert max(timeline.peak_activations) <= facts(name).peak(p, v, m) + 1e-9
    work = m * v * (1 if schedule.forward_only else 3)
    assert timeline.step_time >= work + p - 1, "the last rank cannot begin before the first micro-batch is there"


@pytest.mark.parametrize(("p", "m", "v"), [(4, 5, 3), (4, 9, 3), (5, 7, 2), (5, 12, 2), (6, 9, 2), (6, 7, 3)])
def test_left_over_micro_batches_cost_nothing(p: int, m: int, v: int) -> None:
    """Shapes in which a short last group makes ranks wait for each other for ever."""
    timeline = simulate(build("interleaved-1f1b", ranks=p, micro_batches=m, stages_per_rank=v), Costs(1, 1, 1))
    assert timeline.step_time == 3 * (m * v + p - 1)


def test_interleaved_with_one_stage_a_rank_is_1f1b() -> None:
    for ranks, micro_batches in product((1, 2, 3, 4), (1, 2, 3, 8)):
        one = build("1f1b", ranks=ranks, micro_batches=micro_batches)
        other = build("interleaved-1f1b", ranks=ranks, micro_batches=micro_batches, stages_per_rank=1)
        assert one.rows == other.rows


@pytest.mark.parametrize("row", REFERENCE, ids=lambda row: "{schedule}-{ranks}-{micro_batches}-{hop}".format(**row))
def test_published_orders_have_the_published_numbers(row: dict[str, Any]) -> None:
    v = row["stages_per_rank"]
    schedule = make(row["schedule"], row["ranks"], v, row["micro_batches"])
    timeline = simulate(schedule, Costs(F=row["F"] / v, I=row["I"] / v, W=row["W"] / v, hop=row["hop"]))
    assert timeline.step_time == pytest.approx(row["makespan"], abs=1e-6)
    assert timeline.bubble == pytest.approx(row["bubble"], abs=1e-6)
    assert timeline.span_bubble == pytest.approx(row["span_bubble"], abs=1e-6)
    assert timeline.peak_activations == pytest.approx(row["peaks"])


def test_all_of_the_library_is_tested_here() -> None:
    assert set(LIBRARY) <= set(names())
    for name in LIBRARY:
        assert facts(name).order.__module__.startswith("schedules.library.")

"""The lower bound: never above a step that can be, met where an order is best, and what it says of known schedules."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import Costs, Schedule, Timeline, build, facts, names, simulate
from schedules.bound import lower_bound
from schedules.errors import ScheduleError
from tests.schedules.strategies import legal_schedules, shapes


@given(legal_schedules(), st.integers(0, 1000))
@settings(max_examples=200)
def test_no_step_is_shorter(schedule: Schedule, seed: int) -> None:
    random = np.random.default_rng(seed)
    f, i, w, size = random.uniform(0.1, 2.0, (4, schedule.num_stages))
    costs = Costs(
        f, i, w, hop=float(random.uniform(0, 0.5)), bandwidth=2.0, output_bytes=size,
        speed=random.uniform(0.5, 2.0, schedule.ranks), contention=bool(random.integers(2)),
    )  # fmt: skip
    timeline = simulate(schedule, costs)
    assert timeline.bound <= timeline.step_time + 1e-9
    assert timeline.gap >= -1e-9
    measured = Timeline.measured(schedule, timeline.start, timeline.end)
    assert measured.bound <= measured.step_time + 1e-9


@pytest.mark.parametrize("name", [name for name in names() if name not in ("auto", "v-half", "v-min")])
@given(shapes(), st.sampled_from([(1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (1.0, 0.5, 2.0)]), st.sampled_from([0.0, 0.2]))
@settings(max_examples=25)
def test_no_schedule_is_shorter(
    name: str, shape: tuple[int, int, int], times: tuple[float, float, float], hop: float
) -> None:
    p, v, m = shape
    try:
        schedule = build(name, ranks=p, micro_batches=m, stages_per_rank=v)
    except ScheduleError:
        schedule = build(name, ranks=2 * p, micro_batches=m)
    timeline = simulate(schedule, Costs(*times, hop=hop))
    assert timeline.step_time >= timeline.bound - 1e-9


@given(st.integers(1, 8), st.integers(1, 4), st.integers(0, 30), st.sampled_from([0.0, 0.1, 0.5]))
def test_its_closed_form_with_equal_stages(p: int, v: int, more: int, hop: float) -> None:
    """With enough micro-batches: the work of a rank, behind the way to the last one."""
    f, i, w, m = 1.0, 1.2, 0.8, 6 * p + more
    schedule = build("interleaved-1f1b", ranks=p, micro_batches=m, stages_per_rank=v)
    bound = lower_bound(schedule, Costs(f / v, i / v, w / v, hop=hop))
    assert bound == pytest.approx(m * (f + i + w) + (p - 1) * (f / v + hop))


@given(st.integers(1, 4), st.integers(2, 5))
def test_two_copies_have_half_the_way(half: int, turns: int) -> None:
    p = 2 * half
    timeline = simulate(build("dualpipe", ranks=p, micro_batches=turns * p), Costs())
    assert timeline.bound == 3 * turns * p + half - 1
    assert timeline.gap == pytest.approx(0), "DualPipe reaches it when all passes are equally long"


@pytest.mark.parametrize(("name", "v"), [("zb-h1", 1), ("zb-v", 2), ("interleaved-zb", 4)])
def test_zero_bubble_schedules_reach_it_with_equal_passes(name: str, v: int) -> None:
    timeline = simulate(build(name, ranks=4, micro_batches=8, stages_per_rank=v), Costs(1 / v, 1 / v, 1 / v))
    assert timeline.gap == pytest.approx(0)


def test_one_micro_batch_goes_all_the_way() -> None:
    timeline = simulate(build("zb-h1", ranks=3, micro_batches=1), Costs(F=[1, 2, 3], I=[4, 5, 6], W=[7, 8, 9], hop=0.5))
    assert timeline.bound == 1 + 2 + 3 + 6 + 5 + 4 + 7 + 4 * 0.5 == timeline.step_time


def test_forwards_alone() -> None:
    """The slowest stage does all of its work, the first micro-batch goes the way to it and the last the way on."""
    times = [1.0, 2.5, 0.5]
    timeline = simulate(build("forward-only", ranks=3, micro_batches=4), Costs(F=times, hop=0.25))
    assert timeline.bound == timeline.step_time == 1 + 0.25 + 4 * 2.5 + 0.25 + 0.5


def test_1f1b_is_held_against_orders_that_split_the_backward() -> None:
    timeline = simulate(build("1f1b", ranks=4, micro_batches=8))
    assert timeline.bound == 8 * 3 + 3
    assert timeline.gap == pytest.approx(33 / 27 - 1)
    assert facts("1f1b").splits_backward is False

"""The automatic schedule: never worse than those by name, held against printed values and proved optima."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checks.auto import PRINTED, best_by_name, printed, proved
from schedules import Costs, build, facts, lower, simulate
from schedules.errors import CostError, ImpossibleShape
from schedules.polish import available
from schedules.search import search, task_for
from tests.schedules.pictures import draw

SLOW_MIDDLE = Costs(F=[1, 2, 1], I=[1, 2, 1], W=[1, 2, 1], hop=1)


def uneven(seed: int, ranks: int, stages_per_rank: int) -> Costs:
    """Stages that differ by 30 % either way, slow links, and a rank that is 1.5 times slower."""
    chance = random.Random(seed)
    forward, input_grad, weight_grad = (
        [mean / stages_per_rank * chance.uniform(0.7, 1.3) for _ in range(ranks * stages_per_rank)]
        for mean in (1.0, 1.2, 0.8)
    )
    slow = chance.randrange(ranks)
    speed = [1 / 1.5 if rank == slow else 1.0 for rank in range(ranks)]
    return Costs(F=forward, I=input_grad, W=weight_grad, hop=chance.uniform(0.1, 0.5), speed=speed)


def test_the_docstring_draws_what_runs() -> None:
    schedule = build("auto", ranks=3, micro_batches=5, costs=SLOW_MIDDLE, stages_per_rank=1)
    shown = "\n".join(line.strip() for line in facts("auto").picture.splitlines())
    assert draw(schedule, SLOW_MIDDLE) in shown
    assert draw(build("zb-h1", ranks=3, micro_batches=5), SLOW_MIDDLE) in shown


@given(
    st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 12)),
    st.integers(0, 10_000),
    st.sampled_from([1, 0.5, 1.5]),
)
@settings(max_examples=10)
def test_every_shape_runs_and_is_never_worse_than_one_by_name(
    shape: tuple[int, int, int], seed: int, share: float
) -> None:
    p, v, m = shape
    costs, cap = uneven(seed, p, v), max(1.0, share * p)
    found = search(task_for(p, m, v, costs=costs, memory_cap=cap, work=100_000))
    lower(found.schedule)  # proved inside
    assert found.schedule.ordered
    timeline = simulate(found.schedule, costs)
    assert timeline.step_time == pytest.approx(found.score)
    assert timeline.bound == pytest.approx(found.bound)
    assert max(timeline.peak_activations) <= cap + 1e-9
    assert timeline.bound - 1e-9 <= timeline.step_time <= best_by_name(p, m, (v,), costs, cap)[2] + 1e-9


def test_it_is_shorter_where_the_best_by_name_is_far_above_the_bound() -> None:
    costs = uneven(1, 4, 4)
    found = search(task_for(4, 10, 4, costs=costs, memory_cap=4))
    assert best_by_name(4, 10, (4,), costs, 4)[2] > 1.05 * found.score


@pytest.mark.parametrize("row", [0, 3])
def test_the_printed_values_of_the_zero_bubble_paper(row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checks.auto.PRINTED", PRINTED[row : row + 1])
    assert all(one["passed"] for one in printed())


def test_the_bound_of_four_stages_a_rank_is_met_with_half_as_much_memory_again() -> None:
    found = search(task_for(4, 8, costs=Costs(F=1, I=1.2, W=0.8, hop=0.1), memory_cap=6))
    assert found.schedule.stages_per_rank == 4
    assert found.timeline.step_time == pytest.approx(8 * 3 + 3 * (1 / 4 + 0.1))
    assert max(found.timeline.peak_activations) <= 6


def test_it_chooses_how_many_stages_a_rank_holds() -> None:
    schedule = build("auto", ranks=4, micro_batches=8)
    assert (schedule.stages_per_rank, simulate(schedule, Costs().divided(4)).step_time) == (4, 24.75)
    one = build("auto", ranks=4, micro_batches=8, costs=Costs(F=[1, 1, 1, 1]))
    assert (one.stages_per_rank, simulate(one).step_time) == (1, 27.0)


@pytest.mark.skipif(not available(), reason="needs pipeloom[search]")
def test_the_optimum_of_small_shapes() -> None:
    rows = list(proved(6))
    assert all(row["passed"] and row["proved"] for row in rows)


@pytest.mark.skipif(available(), reason="OR-tools is installed")
def test_polishing_without_the_solver_names_the_extra() -> None:
    with pytest.raises(Exception, match=r"install pipeloom\[search\], or set polish to False"):
        build("auto", ranks=3, micro_batches=4, costs=Costs(F=[1.0, 2.0, 1.3], hop=0.4), polish=True)


def test_the_same_task_gives_the_same_rows() -> None:
    task = task_for(3, 7, 2, costs=uneven(2, 3, 2))
    first = search(task)
    search.__globals__["_search"].cache_clear()
    again = search(task)
    assert again is not first
    assert again.schedule.rows == first.schedule.rows
    assert search(task_for(3, 7, 2, costs=uneven(2, 3, 2))) is again


def test_the_memory_of_each_rank_in_bytes() -> None:
    costs = Costs(activation_bytes=[400.0, 300.0, 200.0], weight_grad_bytes=[100.0, 100.0, 100.0], hop=0.2)
    caps = [1000.0, 650.0, 400.0]
    schedule = build("auto", ranks=3, micro_batches=6, stages_per_rank=1, costs=costs, memory_bytes=caps)
    timeline = simulate(schedule, costs)
    assert all(peak <= cap for peak, cap in zip(timeline.peak_bytes, caps, strict=True))
    with pytest.raises(ImpossibleShape, match="each rank has to hold one micro-batch"):
        build("auto", ranks=3, micro_batches=6, stages_per_rank=1, costs=costs, memory_bytes=[300.0, 650.0, 400.0])


def test_one_number_of_memory_or_one_a_rank() -> None:
    with pytest.raises(CostError, match="memory_cap has 2 numbers, there are 3 ranks"):
        build("auto", ranks=3, micro_batches=4, memory_cap=[1.0, 2.0])


def test_what_was_found_is_told() -> None:
    told = search(task_for(3, 5, costs=SLOW_MIDDLE)).text()
    assert told.startswith("step 32, 0.00% above the bound; made from ")
    assert "the best schedule by name, zb-h1 with 1 stage a rank, takes 34" in told.replace("interleaved-zb", "zb-h1")


def test_the_longest_span_is_another_aim() -> None:
    """ZB-H2's span has no bubble with equal costs, and its memory is what it takes."""
    found = search(task_for(4, 12, 1, memory_cap=7, metric="span"))
    assert found.timeline.span_bubble == pytest.approx(0.0)
    with pytest.raises(CostError, match="metric is 'longest'; set it to"):
        task_for(4, 12, metric="longest")  # type: ignore[arg-type]

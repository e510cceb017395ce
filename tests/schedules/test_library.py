"""Every schedule that comes with the package: its picture, its closed form, its promises, published numbers."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import Costs, Kind, Pair, Schedule, build, facts, lower, names, simulate
from schedules.errors import ImpossibleShape
from tests.schedules.pictures import draw
from tests.schedules.strategies import shapes

EQUAL = Costs(F=1.0, I=0.5, W=0.5)
"""A backward that takes as long as a forward."""
CLASSIC = ("1f1b", "forward-only", "gpipe", "interleaved-1f1b")
SPLIT = ("dualpipe", "dualpipe-v", "interleaved-zb", "v-half", "v-min", "zb-h1", "zb-h2", "zb-v")
LIBRARY = (*CLASSIC, *SPLIT, "1f1b-eager", "breadth-first", "chimera", "hanayo")


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
    ("name", "shapes", "costs"),
    [
        ("1f1b", [(4, 6, 1)], None),
        ("1f1b-eager", [(4, 6, 1)], None),
        ("breadth-first", [(2, 4, 2)], None),
        ("chimera", [(4, 8, 2)], EQUAL),
        ("dualpipe", [(4, 8, 2)], None),
        ("dualpipe-v", [(3, 6, 2)], None),
        ("forward-only", [(4, 4, 2)], None),
        ("gpipe", [(4, 4, 1), (2, 4, 2)], None),
        ("hanayo", [(4, 4, 2)], EQUAL),
        ("interleaved-1f1b", [(4, 4, 2)], None),
        ("interleaved-zb", [(4, 4, 2)], None),
        ("v-half", [(4, 6, 2)], None),
        ("v-min", [(4, 6, 2)], None),
        ("zb-h1", [(4, 6, 1)], None),
        ("zb-h2", [(4, 7, 1)], None),
        ("zb-v", [(4, 7, 2)], None),
    ],
)
def test_the_docstring_draws_what_runs(name: str, shapes: list[tuple[int, int, int]], costs: Costs | None) -> None:
    for ranks, micro_batches, stages_per_rank in shapes:
        schedule = build(name, ranks=ranks, micro_batches=micro_batches, stages_per_rank=stages_per_rank)
        shown = "\n".join(line.strip() for line in facts(name).picture.splitlines())
        assert draw(schedule, costs) in shown


def test_more_micro_batches_than_a_group_and_not_a_multiple() -> None:
    schedule = build("interleaved-1f1b", ranks=2, micro_batches=5, stages_per_rank=2)
    expected = """\
rank 0 | 0 1 2 0'1'2'. aaa'3 bbb'4 ccc'3'aaa 4'bbb . ccc . ddd'eee'ddd eee
rank 1 | . 0 1 2 0'aaa'1'bbb'2'ccc'3 aaa 4 bbb 3'ccc 4'ddd'eee'ddd eee . ."""
    assert draw(schedule) == expected


@pytest.mark.parametrize("name", CLASSIC)
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
@settings(max_examples=30)
def test_every_shape_is_complete_legal_and_runs(name: str, shape: tuple[int, int, int]) -> None:
    if not facts(name).ranks.allow(shape[0], 2, shape[2]):
        with pytest.raises(
            ImpossibleShape, match=f"{name} needs an even number of ranks, not {shape[0]}; set ranks to"
        ):
            make(name, *shape)
        shape = (shape[0] + 1, *shape[1:])
    schedule = make(name, *shape)  # checked inside
    p, v, m = schedule.ranks, schedule.stages_per_rank, schedule.micro_batches
    assert schedule.ordered or name == "breadth-first"
    assert facts(name).splits_backward >= schedule.splits_backward
    lower(schedule)  # proved inside
    timeline = simulate(schedule)
    assert max(timeline.peak_activations) <= facts(name).peak(p, v, m) + 1e-9


@pytest.mark.parametrize("name", ["dualpipe", "dualpipe-v"])
@given(shapes())
@settings(max_examples=40)
def test_pairs_of_forward_and_backward(name: str, shape: tuple[int, int, int]) -> None:
    """The same actions in the same order, of which some are one entry; alone where a partner is left out."""
    p, _, m = shape
    shape = {"ranks": p + p % 2, "micro_batches": m}
    plain, paired = build(name, **shape), build(name, **shape, overlapped=True)
    lower(paired)
    assert (paired.actions[:, :3] == plain.actions[:, :3]).all()
    pairs = [entry for row in paired.rows for entry in row if isinstance(entry, Pair)]
    assert all((pair.first.kind, pair.second.kind) == (Kind.F, Kind.B) for pair in pairs)
    assert len(pairs) > 0 or m < 2 * shape["ranks"]
    costs = Costs(F=1.0, I=1.0, W=0.5, hop=0.1)
    assert simulate(plain, costs).step_time <= simulate(paired, costs).step_time + 1e-9


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


def test_all_of_the_library_is_tested_here() -> None:
    assert set(LIBRARY) <= set(names())
    for name in LIBRARY:
        assert facts(name).order.__module__.startswith("schedules.library.")

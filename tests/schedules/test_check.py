"""What the checker refuses, and in which words."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from schedules import Action, Pair, Schedule, check, simulate
from schedules.errors import DeadlockError, IllegalSchedule
from tests.schedules.pictures import rows
from tests.schedules.strategies import legal_schedules


@given(legal_schedules())
@settings(max_examples=200)
def test_any_legal_schedule_passes(schedule: Schedule) -> None:
    check(schedule)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0 0B0 0F1     \n 1F0 1B0 1F1 1B1", "0B1 runs never, it must run once"),
        ("0F0 0B0 0F1 0B1 \n 1F0 1B0 1B1    ", "1F1 runs never, it must run once"),
        ("0F0 0B0 0F0 0B1 \n 1F0 1B0 1F1 1B1", "0F0 runs twice, it must run once"),
        ("0F0 0B0 0F1 0I1 \n 1F0 1B0 1F1 1B1", "0W1 runs never, it must run once"),
        ("0F0 0B0 0F1 0B1 0W1 \n 1F0 1B0 1F1 1B1", "0W1 runs once, it must run never"),
        ("0B0 0F0 0F1 0B1 \n 1F0 1B0 1F1 1B1", "rank 0 runs 0B0 before 0F0, which it needs"),
        ("0F0 0B0 0F1 0W1 0I1 \n 1F0 1B0 1F1 1B1", "rank 0 runs 0W1 before 0I1, which it needs"),
        ("0F0 0B0 1F1 0B1 \n 1F0 1B0 0F1 1B1", "rank 0 runs 1F1, but that stage is on rank 1"),
    ],
)
def test_what_is_missing_doubled_or_misplaced(text: str, message: str) -> None:
    with pytest.raises(IllegalSchedule, match=message):
        check(Schedule.from_rows("wrong", rows(text), [0, 1], micro_batches=2))


def test_a_circle_is_printed() -> None:
    schedule = Schedule.from_rows("circle", rows("0F0 0B0 0F1 0B1 \n 1F1 1B1 1F0 1B0"), [0, 1])
    expected = """these wait for each other, so none of them can ever run:
  rank 0's 0B0 waits for rank 1's 1B0, which comes after rank 1's 1F1
  rank 1's 1F1 waits for rank 0's 0F1, which comes after rank 0's 0B0"""
    with pytest.raises(DeadlockError) as caught:
        check(schedule)
    assert str(caught.value) == expected
    with pytest.raises(DeadlockError, match="1F1 waits for rank 0's 0F1"):
        simulate(schedule)


def test_the_naive_order_for_a_short_last_group_is_a_circle() -> None:
    """Four ranks, five micro-batches, three stages a rank: groups of 4 and 1, run in order."""
    naive = []
    for rank in range(4):
        stages = [rank, rank + 4, rank + 8]
        groups = [range(4), range(4, 5)]
        forwards = [f"{stage}F{m}" for group in groups for stage in stages for m in group]
        backwards = [f"{stage}B{m}" for group in groups for stage in reversed(stages) for m in group]
        ahead = 2 * (3 - rank) + 8
        turns = [one for pair in zip(forwards[ahead:], backwards, strict=False) for one in pair]
        row = [*forwards[:ahead], *turns, *backwards[len(forwards) - ahead :]]
        naive.append([Action.parse(action) for action in row])
    with pytest.raises(DeadlockError):
        check(Schedule.from_rows("naive", naive, [stage % 4 for stage in range(12)]))


def test_a_pair_may_not_hold_what_it_needs() -> None:
    pair = Pair(Action.parse("0F0"), Action.parse("0B0"))
    with pytest.raises(IllegalSchedule, match="rank 0 runs 0B0 beside 0F0, which it needs"):
        check(Schedule.from_rows("pair", [[pair]], [0]))


def test_a_table_may_not_join_three() -> None:
    table = Schedule.from_rows("three", rows("0F0 0F1 0F2"), [0]).actions.copy()
    table[:2, 3] = 1
    with pytest.raises(IllegalSchedule, match="rank 0 joins an action that is not one of two"):
        check(Schedule.from_rows("three", [table], [0]))


def test_a_route_passes_a_stage_once() -> None:
    with pytest.raises(IllegalSchedule, match=r"route 0 is \(0, 0\)"):
        check(Schedule.from_rows("twice", rows("0F0"), [0], routes=[(0, 0)]))


def test_an_unchecked_schedule_with_holes_is_not_simulated() -> None:
    with pytest.raises(IllegalSchedule, match="1F0 needs an action of its own or its neighbouring stage"):
        simulate(Schedule.from_rows("hole", rows("0F1 \n 1F0"), [0, 1], micro_batches=2))

"""Parts of a schedule that are schedules again."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import Schedule, build, check, lower
from schedules.action import actions_of
from schedules.restrict import forwards_of, shortened
from tests.schedules.strategies import legal_schedules


@given(legal_schedules(), st.data())
@settings(max_examples=100)
def test_a_part_of_any_legal_schedule_is_legal(schedule: Schedule, data: st.DataObject) -> None:
    number = data.draw(st.integers(1, schedule.micro_batches))
    for part in (shortened(schedule, number), forwards_of(schedule, number)):
        check(part)
        lower(part)
        assert part.micro_batches == number
        assert part.rank_of_stage == schedule.rank_of_stage
    assert shortened(schedule, schedule.micro_batches) is schedule


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_what_is_left_keeps_its_order(name: str) -> None:
    whole = build(name, ranks=3, micro_batches=5)
    short = shortened(whole, 2)
    for rank, row in enumerate(short.rows):
        assert list(row) == [entry for entry in whole.rows[rank] if actions_of(entry)[0].micro_batch < 2]
    assert forwards_of(whole, 5).rows == build("forward-only", ranks=3, micro_batches=5).rows

"""Actions and pairs, and how they are written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules import Action, Kind, Pair
from schedules.action import actions_of, parse_entry
from schedules.errors import ScheduleError, UnreadableSchedule

actions = st.builds(Action, st.integers(0, 5000), st.sampled_from(Kind), st.integers(0, 5000))


def test_an_action_is_written_as_stage_kind_micro_batch() -> None:
    assert str(Action(2, Kind.F, 0)) == "2F0"
    assert f"{Action(12, Kind.W, 34)}" == "12W34"
    assert Action.parse("2F0") == Action(2, Kind.F, 0)


def test_a_pair_is_written_as_torch_writes_it() -> None:
    pair = Pair(Action(2, Kind.F, 0), Action(3, Kind.B, 1))
    assert str(pair) == "(2F0;3B1)OVERLAP_F_B"
    assert actions_of(pair) == (Action(2, Kind.F, 0), Action(3, Kind.B, 1))
    assert actions_of(pair.first) == (pair.first,)


@given(st.one_of(actions, st.builds(Pair, actions, actions)))
def test_what_is_written_is_read_back(entry: Action | Pair) -> None:
    assert parse_entry(str(entry)) == entry
    assert type(parse_entry(f"  {entry} ")) is type(entry)


@pytest.mark.parametrize("text", ["", "F0", "2X0", "2F", "-1F0", "2F0 2F1", "(2F0)OVERLAP_F_B", "(2F0;3B1)", "2f0"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(UnreadableSchedule, match="such as '2F0'"):
        parse_entry(text)
    assert issubclass(UnreadableSchedule, ScheduleError)

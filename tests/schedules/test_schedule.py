"""The schedule as an object: what it says about itself, and what it refuses to be."""

from __future__ import annotations

import networkx
import numpy as np
import pytest
from hypothesis import given, settings

from schedules import Action, Kind, Pair, Schedule, build
from schedules.errors import IllegalSchedule
from schedules.needs import NOTHING
from tests.schedules.pictures import rows
from tests.schedules.strategies import legal_schedules


@pytest.fixture
def both_ways() -> Schedule:
    """Two routes in opposite directions over two ranks: stages 0 and 3 hold the same layers, so do 1 and 2."""
    return Schedule.from_rows(
        "both-ways",
        rows("""
            0F0 3F1 3B1 0B0
            2F1 1F0 1B0 2B1
        """),
        rank_of_stage=[0, 1, 1, 0],
        routes=[(0, 1), (2, 3)],
        layer_group_of_stage=[0, 1, 0, 1],
    )


def test_rows_are_actions_made_of_integers() -> None:
    schedule = build("interleaved-1f1b", ranks=2, micro_batches=2, stages_per_rank=2)
    assert [" ".join(map(str, row)) for row in schedule.rows] == [
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1",
    ]
    assert schedule.actions.dtype == np.int32
    assert not schedule.actions.flags.writeable
    assert schedule.rows[0][0] == Action(0, Kind.F, 0)
    assert (schedule.num_stages, schedule.stages_per_rank, schedule.num_layer_groups) == (4, 2, 4)
    assert schedule.rank_of_stage == (0, 1, 0, 1)
    assert schedule.stages_of_rank(1) == (1, 3)


def test_one_route_through_all_stages() -> None:
    schedule = build("interleaved-1f1b", ranks=2, micro_batches=3, stages_per_rank=2)
    assert schedule.routes == ((0, 1, 2, 3),)
    assert schedule.route_of_micro_batch == (0, 0, 0)
    assert schedule.layer_group_of_stage == (0, 1, 2, 3)
    assert (schedule.first_stage(2), schedule.last_stage(2)) == (0, 3)
    assert [schedule.next_stage(stage, 0) for stage in range(4)] == [1, 2, 3, None]
    assert [schedule.previous_stage(stage, 0) for stage in range(4)] == [None, 0, 1, 2]


def test_first_and_last_stage_are_those_of_the_micro_batch(both_ways: Schedule) -> None:
    assert both_ways.route_of_micro_batch == (0, 1)
    assert [both_ways.first_stage(number) for number in (0, 1)] == [0, 2]
    assert [both_ways.last_stage(number) for number in (0, 1)] == [1, 3]
    assert both_ways.next_stage(2, 1) == 3
    assert both_ways.next_stage(1, 0) is None
    assert both_ways.num_layer_groups == 2


def test_what_an_action_needs(both_ways: Schedule) -> None:
    text = [str(both_ways.action(number)) for number in range(len(both_ways.actions))]
    source, own = ([None if n == NOTHING else text[n] for n in need] for need in both_ways.needs)
    assert dict(zip(text, zip(source, own, strict=True), strict=True)) == {
        "0F0": (None, None),
        "1F0": ("0F0", None),
        "1B0": (None, "1F0"),
        "0B0": ("1B0", "0F0"),
        "2F1": (None, None),
        "3F1": ("2F1", None),
        "3B1": (None, "3F1"),
        "2B1": ("3B1", "2F1"),
    }


def test_a_split_backward_waits_for_input_gradients_only() -> None:
    schedule = Schedule.from_rows("split", rows("0F0 0I0 0W0 \n 1F0 1I0 1W0"), [0, 1])
    text = [str(schedule.action(number)) for number in range(6)]
    needs = {text[n]: {text[need[n]] for need in schedule.needs if need[n] >= 0} for n in range(6)}
    assert needs == {
        "0F0": set(), "0I0": {"0F0", "1I0"}, "0W0": {"0I0"}, "1F0": {"0F0"}, "1I0": {"1F0"}, "1W0": {"1I0"},
    }  # fmt: skip


def test_what_kind_of_schedule_it_is(both_ways: Schedule) -> None:
    split = Schedule.from_rows("split", rows("0F0 0F1 0I0 0I1 0W1 0W0"), [0])
    assert build("forward-only", ranks=2, micro_batches=2).forward_only
    assert not both_ways.forward_only
    assert split.splits_backward
    assert not both_ways.splits_backward
    assert both_ways.ordered
    assert not split.ordered, "W1 comes before W0"
    assert not Schedule.from_rows("reversed", rows("0F0 0F1 0B1 0B0"), [0]).ordered


def test_equal_schedules_are_equal(both_ways: Schedule) -> None:
    def one(**change: int) -> Schedule:
        return build("1f1b", **{"ranks": 2, "micro_batches": 3, **change})

    assert one() == one()
    assert hash(one()) == hash(one())
    assert one() != one(micro_batches=4)
    assert one() != build("gpipe", ranks=2, micro_batches=3)
    assert len({one(), one(), both_ways}) == 2


def test_pairs_are_one_entry_of_two_actions() -> None:
    pair = Pair(Action(0, Kind.B, 0), Action(0, Kind.F, 1))
    schedule = Schedule.from_rows("pair", [[Action(0, Kind.F, 0), pair, Action(0, Kind.B, 1)]], [0])
    assert schedule.rows[0][1] == pair
    assert schedule.entries.of_action.tolist() == [0, 1, 1, 2]
    assert schedule.entries.first_action.tolist() == [0, 1, 3]
    assert schedule.describe(1) == "rank 0's (0B0;0F1)OVERLAP_F_B"


def test_the_graph_says_why_an_entry_waits() -> None:
    graph = build("1f1b", ranks=2, micro_batches=2).graph()
    edges = {f"{a}-{b}": kind for a, b, kind in graph.edges.data("kind")}
    assert edges == {
        "0F0-0F1": "row", "0F1-0B0": "row", "0B0-0B1": "row", "0F0-0B0": "need", "0F1-0B1": "need",
        "1F0-1B0": "need", "1B0-1F1": "row", "1F1-1B1": "need",
        "0F0-1F0": "message", "0F1-1F1": "message", "1B0-0B0": "message", "1B1-0B1": "message",
    }  # fmt: skip
    assert graph.nodes[Action(1, Kind.F, 1)] == {"rank": 1, "place": 2}


@given(legal_schedules())
@settings(max_examples=50)
def test_the_graph_of_any_legal_schedule_has_no_circle(schedule: Schedule) -> None:
    assert networkx.is_directed_acyclic_graph(schedule.graph())
    assert Schedule.from_rows(schedule.name, schedule.rows, schedule.rank_of_stage, routes=schedule.routes) == schedule


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rank_of_stage": [0]}, "stage 1 does not exist; there are 1"),
        ({"rank_of_stage": [0, 2]}, "rank of a stage 2 does not exist; there are 2"),
        ({"micro_batches": 1}, "micro-batch 1 does not exist; there are 1"),
        ({"routes": [(0, 1, 2)]}, "stage of a route 2 does not exist; there are 2"),
        ({"route_of_micro_batch": [0]}, "route_of_micro_batch has 1 numbers, it must have 2"),
        ({"layer_group_of_stage": [0]}, "layer_group_of_stage has 1 numbers, it must have 2"),
    ],
)
def test_numbers_that_point_nowhere_are_refused(wrong: dict[str, object], message: str) -> None:
    good = {"rank_of_stage": [0, 1], "rows": rows("0F0 0F1 \n 1F0 1F1")}
    with pytest.raises(IllegalSchedule, match=message):
        Schedule.from_rows("wrong", **{**good, **wrong})  # type: ignore[arg-type]

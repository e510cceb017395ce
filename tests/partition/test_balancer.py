"""What layers and ranks cost now, and when moving layers pays: on made-up times, so that every answer is known."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partition import LayerCost, Partition, Profile, make_partition, predict_timeline
from partition.balancer import Alarm, Proposal, Steps, Terms, propose
from partition.drift import Seconds, believed
from partition.moves import Move, Moves
from schedules import Schedule, build

TERMS = Terms(window=5, least_gain=0.05, horizon=200)


def profile(costs: Sequence[float], speeds: tuple[float, ...] = ()) -> Profile:
    """Layers whose forward is a third of their time, and W as long as I."""
    layers = [
        LayerCost(name=f"layers.{n}", type="Block", forward=c / 3, input_grad=c / 3, weight_grad=c / 3)
        for n, c in enumerate(costs)
    ]
    return Profile(layers=tuple(layers), speeds=speeds)


def seen(costs: Sequence[float], cuts: Sequence[int], speeds: Sequence[float]) -> list[dict[int, Seconds]]:
    """What layers take on ranks of these speeds, as a schedule shows it that does not split the backward."""
    return [
        {n: Seconds(costs[n] / 3 / speed, costs[n] * 2 / 3 / speed) for n in range(begin, end)}
        for begin, end, speed in zip(cuts[:-1], cuts[1:], speeds, strict=True)
    ]


def costs_of(found: Profile) -> list[float]:
    return [layer.seconds for layer in found.layers]


@given(
    costs=st.lists(st.floats(0.5, 2.0), min_size=8, max_size=16),
    factor=st.sampled_from([0.4, 0.7, 1.5, 3.0]),
    rank=st.integers(0, 2),
)
def test_a_rank_all_of_whose_layers_changed_alike_has_changed(costs: list[float], factor: float, rank: int) -> None:
    cuts = (0, len(costs) // 3, 2 * len(costs) // 3, len(costs))
    speeds = [1.0, 1.0, 1.0]
    speeds[rank] *= factor
    found = believed(profile(costs), seen(costs, cuts, speeds))
    assert found.speeds == pytest.approx(speeds)
    assert costs_of(found) == pytest.approx(costs)


def test_what_is_slower_everywhere_are_the_layers() -> None:
    found = believed(profile([1.0] * 6), seen([2.5] * 6, (0, 2, 6), (1.0, 1.0)))
    assert found.speeds == ()
    assert costs_of(found) == pytest.approx([2.5] * 6)


def test_one_layer_among_others_has_changed_by_itself() -> None:
    now = [1.0, 1.0, 6.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    found = believed(profile([1.0] * 8), seen(now, (0, 5, 8), (1.0, 1.0)))
    assert found.speeds == ()
    assert costs_of(found) == pytest.approx(now)


def test_layers_that_stay_slow_when_they_have_moved_were_slow_themselves() -> None:
    now = [3.0] * 4 + [1.0] * 4
    first = believed(profile([1.0] * 8), seen(now, (0, 4, 8), (1.0, 1.0)))
    assert first.speeds == pytest.approx((1 / 3, 1.0))
    second = believed(first, seen(now, (0, 2, 8), (1.0, 1.0)), [Move(2, 0, 1), Move(3, 0, 1)])
    assert second.speeds == ()
    assert costs_of(second) == pytest.approx(now)


def test_a_backward_that_was_split_is_told_apart() -> None:
    took = [{0: Seconds(1.0, 2.0, 0.5)}, {1: Seconds(1.0, 3.0)}]
    one, other = believed(profile([3.5, 4.0]), took).layers
    assert (one.input_grad, one.weight_grad) == pytest.approx((2.0, 0.5))
    assert (other.input_grad, other.weight_grad) == pytest.approx((1.5, 1.5))


# -- decisions -----------------------------------------------------------------------------------------------


def decide(before: Profile, cuts: tuple[int, ...], steps: Steps, schedule: Schedule, *, takes: float = 0.0) -> Proposal:
    def cut(costs: Profile) -> Partition:
        return make_partition("profile", schedule, profile=costs)

    return propose(before, schedule, Partition(cuts), steps, cut, TERMS, move_seconds=lambda moves: takes)


SCHEDULE = build("1f1b", ranks=2, micro_batches=8)
SLOW = [seen([1.0] * 12, (0, 6, 12), (1.0, 0.5))] * 5


def test_layers_leave_a_slow_rank_for_the_best_cuts_of_its_true_speed() -> None:
    found = decide(profile([1.0] * 12), (0, 6, 12), SLOW, SCHEDULE)
    best = make_partition("profile", SCHEDULE, profile=profile([1.0] * 12, (1.0, 0.5)))
    assert (found.verdict, found.partition) == ("move", best)
    assert found.reason == "rank 1 is 2.00 times as slow as the others"
    assert found.moves == Moves.between(Partition((0, 6, 12)), best, SCHEDULE)
    assert found.then == pytest.approx(predict_timeline(found.profile, best, SCHEDULE).step_time)


def test_a_move_that_takes_longer_than_it_saves_is_none() -> None:
    found = decide(profile([1.0] * 12), (0, 6, 12), SLOW, SCHEDULE)
    saved = (found.now - found.then) * TERMS.horizon
    assert decide(profile([1.0] * 12), (0, 6, 12), SLOW, SCHEDULE, takes=0.99 * saved).verdict == "move"
    refused = decide(profile([1.0] * 12), (0, 6, 12), SLOW, SCHEDULE, takes=1.01 * saved)
    assert refused.verdict == "stay"
    assert "more than it would save in 200 steps" in refused.reason


def test_what_some_steps_only_show_has_to_wait() -> None:
    usual = [seen([1.0] * 12, (0, 6, 12), (1.0, 1.0))] * 2
    assert decide(profile([1.0] * 12), (0, 6, 12), usual + SLOW[:3], SCHEDULE).verdict == "wait"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("by", ["layer", "rank"])
def test_nothing_moves_for_noise(seed: int, by: str) -> None:
    """500 steps in which every time is off by up to a tenth, each layer's by itself or all of a rank together."""
    moves, rings = _watch(500, _noise(random.Random(seed), by), Alarm(TERMS))
    assert moves == 0
    assert rings < 500


def _noise(draw: random.Random, by: str) -> Callable[[], list[dict[int, Seconds]]]:
    def step() -> list[dict[int, Seconds]]:
        of_rank = [draw.uniform(0.9, 1.1) for _ in range(4)]
        costs = [draw.uniform(0.9, 1.1) if by == "layer" else of_rank[n // 4] for n in range(16)]
        return seen(costs, (0, 4, 8, 12, 16), (1.0,) * 4)

    return step


def _watch(steps: int, step: Callable[[], list[dict[int, Seconds]]], alarm: Alarm) -> tuple[int, int]:
    """How often a run would have moved layers, and looked at them."""
    schedule = build("1f1b", ranks=4, micro_batches=8)
    window: list[list[dict[int, Seconds]]] = []
    belief, moves, rings = profile([1.0] * 16), 0, 0
    for _ in range(steps):
        window = [*window, step()][-TERMS.window :]
        if alarm.rings([8 * sum(took.total for took in rank.values()) for rank in window[-1]]):
            rings += 1
            found = decide(belief, (0, 4, 8, 12, 16), window, schedule)
            if found.verdict != "wait":
                belief = found.profile
                alarm.settle()
            moves += found.verdict == "move"
    return moves, rings


def test_the_alarm_rings_for_what_is_new_and_uneven() -> None:
    alarm = Alarm(TERMS)
    assert not any(alarm.rings([1.0, 1.0]) for _ in range(10))
    assert [alarm.rings([1.0, 1.5]) for _ in range(4)] == [False, False, True, True]
    alarm.settle()
    assert not any(alarm.rings([2.0, 3.0]) for _ in range(10))  # both twice as long: nothing has changed between them
    assert [alarm.rings([2.0, 4.0]) for _ in range(3)] == [False, False, True]
    alarm.reset()
    assert [alarm.rings([2.0, 4.0]) for _ in range(5)] == [False, False, False, False, True]

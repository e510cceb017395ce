"""Costs at other sizes of micro-batch, and the size that is chosen while training runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partition import LayerCost, Profile, ProfileError
from partition.sizes import Sized, SizeWatch, best, costs_at, numbers_of, tried


def profile(forward: float, kept: int = 0, layers: int = 2, hop: float = 0.0) -> Profile:
    cost = LayerCost(
        name="l", type="L", forward=forward, input_grad=forward, weight_grad=forward, activation_bytes=kept
    )
    return Profile(layers=(cost,) * layers, hop=hop)


def test_numbers_are_the_divisors():
    assert numbers_of(12) == [1, 2, 3, 4, 6, 12]
    assert numbers_of(1) == [1]


@given(
    a=st.floats(0, 10), b=st.floats(0.01, 10), sizes=st.sets(st.integers(1, 64), min_size=2, max_size=4),
    rows=st.integers(1, 64),
)  # fmt: skip
def test_what_lies_on_a_line_is_found_on_it(a, b, sizes, rows):
    known = {size: profile(a + b * size, hop=b * size) for size in sizes}
    found = costs_at(rows, known)
    assert found.rows == rows
    assert found.hop == pytest.approx(b * rows, rel=1e-6)
    for layer in found.layers:
        assert layer.forward == layer.weight_grad == pytest.approx(a + b * rows, rel=1e-6)


def test_one_size_is_taken_as_proportional_and_none_is_refused():
    assert costs_at(8, {2: profile(1.0, kept=100)}).layers[0].forward == 4.0
    assert costs_at(8, {2: profile(1.0, kept=100)}).layers[0].activation_bytes == 400
    with pytest.raises(ProfileError):
        costs_at(8, {})


def test_neither_part_of_a_line_is_below_nothing():
    falling = costs_at(1, {4: profile(2.0), 8: profile(1.0)}).layers[0].forward
    assert falling == 1.5  # the mean, at any size
    steep = costs_at(1, {4: profile(1.0), 8: profile(3.0)}).layers[0].forward
    assert steep == pytest.approx((0.25 + 0.375) / 2)
    assert costs_at(3, {4: profile(0.0), 8: profile(0.0)}).layers[0].forward == 0.0


def test_the_shortest_step_and_the_fewest_micro_batches_among_equals():
    assert best([Sized(1, 3.0), Sized(2, 1.0), Sized(4, 1.0), Sized(8, None)]) == Sized(2, 1.0)
    assert best([Sized(1, None)]) is None


ROWS, RANKS = 64, 4


def step(number, costs):
    """Seconds of 1F1B on equal stages."""
    return (number + RANKS - 1) * sum(layer.seconds for layer in costs.layers)


def seen(a, b, number):
    return profile(a + b * ROWS / number)


def swept(a, b):
    return min(tried(ROWS, {ROWS // n: seen(a, b, n) for n in numbers_of(ROWS)}, step), key=lambda one: one.seconds)


def run(watch, number, a, b, windows, predict=step):
    """The numbers of micro-batches of so many windows of steps."""
    numbers = [number]
    for _ in range(windows):
        number = watch.decide(number, seen(a, b, number), predict).number
        numbers.append(number)
    return numbers


@pytest.mark.parametrize(("a", "b"), [(1.0, 1.0), (0.0, 1.0), (30.0, 1.0), (1.0, 0.0), (0.1, 2.0)])
def test_the_best_number_is_there_after_two_windows_and_stays(a, b):
    watch = SizeWatch(ROWS, least_gain=0.01)
    numbers = run(watch, 4, a, b, 6)
    assert numbers[1] in (2, 8)  # a look at the next
    assert step(numbers[2], seen(a, b, numbers[2])) <= 1.05 * swept(a, b).seconds
    assert len(set(numbers[2:])) == 1
    assert watch.settled


def test_layers_that_have_changed_are_looked_at_anew():
    watch = SizeWatch(ROWS, least_gain=0.01)
    begun = run(watch, 8, 1.0, 1.0, 4)[-1]
    assert begun == swept(1.0, 1.0).number
    later = run(watch, begun, 40.0, 1.0, 4)
    assert later[-1] == swept(40.0, 1.0).number != begun
    assert len(watch.known) >= 2


def test_noise_changes_nothing():
    watch = SizeWatch(ROWS, least_gain=0.05)
    number = run(watch, 8, 1.0, 1.0, 4)[-1]
    for factor in (1.05, 0.96, 1.03, 0.95, 1.05) * 10:
        assert watch.decide(number, seen(factor, factor, number), step).number == number


def test_sizes_for_which_there_is_no_memory_are_not_even_looked_at():
    tried_numbers = []

    def within(number, costs):
        return None if number < 4 else step(number, costs)

    watch = SizeWatch(ROWS, least_gain=0.01)
    tried_numbers = run(watch, 4, 50.0, 0.1, 6, within)
    assert min(tried_numbers) == 4


def test_where_nothing_else_is_possible_it_stays():
    watch = SizeWatch(ROWS, least_gain=0.01)
    assert run(watch, 4, 1.0, 1.0, 3, lambda number, costs: 1.0 if number == 4 else None) == [4] * 4

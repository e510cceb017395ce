"""Predicted memory against what can be counted by hand, and against a row walked entry by entry."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partition import (
    LayerCost,
    OutOfMemory,
    Partition,
    PartitionError,
    Profile,
    StateBytes,
    make_partition,
    predict_memory,
)
from partition import memory as predicted
from schedules import Action, Kind, Schedule, build, simulate

SIZES = {
    "activation_bytes": 100,
    "weight_grad_bytes": 30,
    "output_bytes": 7,
    "parameters": 10,
    "parameter_bytes": 40,
    "buffer_bytes": 3,
}


def test_1f1b_by_hand(make_profile):
    schedule = build("1f1b", ranks=3, micro_batches=8)
    first, middle, last = predict_memory(make_profile([1.0] * 6, **SIZES), Partition((0, 2, 4, 6)), schedule)
    assert first == (80.0, 80.0, 160.0, 6.0, 3 * 200.0, 2 * 7.0, 0.0)
    assert middle == (80.0, 80.0, 160.0, 6.0, 2 * 200.0, 4 * 7.0, 0.0)
    assert last.activations == 200.0
    assert first.total == 80 + 80 + 160 + 6 + 600 + 14


def test_state_bytes(make_profile):
    schedule = build("1f1b", ranks=2, micro_batches=1)
    state = StateBytes(gradient=8.0, optimizer=0.0)
    first, _ = predict_memory(make_profile([1.0] * 2, **SIZES), Partition((0, 1, 2)), schedule, state)
    assert (first.gradients, first.optimizer) == (80.0, 0.0)


def test_zero_in_parts_and_what_is_whole_meanwhile(make_profile):
    schedule = build("1f1b", ranks=2, micro_batches=1)
    profile = make_profile([1.0] * 6, **SIZES)

    def first(zero):
        return predict_memory(profile, Partition((0, 3, 6)), schedule, StateBytes().in_parts(zero, 4))[0]

    assert first(0)[:3] == (120.0, 120.0, 240.0)
    assert first(1)[:3] == (120.0, 120.0, 60.0)
    assert first(2)[:3] == (120.0, 30.0, 60.0)
    assert first(3)[:3] == (30.0, 30.0, 60.0)
    assert [first(zero).whole for zero in range(4)] == [0.0, 0.0, 40.0, 2 * 40.0 + 40.0]


def test_weights_of_16_bits_have_a_copy_that_the_optimizer_steps_on(make_profile):
    schedule = build("1f1b", ranks=1, micro_batches=1)
    state = StateBytes(master=4.0)
    (wide,) = predict_memory(make_profile([1.0], **SIZES), Partition((0, 1)), schedule, state)
    (narrow,) = predict_memory(
        make_profile([1.0], **{**SIZES, "parameter_bytes": 20}), Partition((0, 1)), schedule, state
    )
    assert (wide.optimizer, narrow.optimizer) == (80.0, 120.0)


def test_inference_keeps_two_neighbouring_outputs(make_profile):
    schedule = build("forward-only", ranks=2, micro_batches=4)
    first, last = predict_memory(make_profile([1.0] * 5, **SIZES), Partition((0, 1, 5)), schedule)
    assert (first.gradients, first.optimizer, first.activations, first.messages) == (0.0, 0.0, 7.0, 7.0)
    assert last.activations == 14.0


def test_messages_are_as_large_as_what_enters_a_stage():
    sizes = (100, 20, 3)
    layers = tuple(
        LayerCost(name="", type="", forward=1, input_grad=1, weight_grad=1, output_bytes=size) for size in sizes
    )
    schedule = build("1f1b", ranks=3, micro_batches=4)
    memory = predict_memory(Profile(layers=layers), Partition((0, 1, 2, 3)), schedule)
    assert [rank.messages for rank in memory] == [200.0, 240.0, 40.0]
    # An empty stage hands on what it got.
    memory = predict_memory(Profile(layers=layers), Partition((0, 1, 1, 3)), schedule)
    assert [rank.messages for rank in memory] == [200.0, 400.0, 200.0]


def split_backward():
    """One rank whose W run late."""
    row = ["0F0", "0F1", "0I0", "0I1", "0F2", "0I2", "0W0", "0W1", "0W2"]
    return Schedule.from_rows("late", [[Action.parse(text) for text in row]], (0,))


def test_between_input_and_weight_gradients_less_is_alive(make_profile):
    (rank,) = predict_memory(make_profile([1.0] * 2, **SIZES), Partition((0, 2)), split_backward())
    # 400 after two forwards; 60 + 60 + 200 when the third begins.
    assert rank.activations == 400.0
    (rank,) = predict_memory(
        make_profile([1.0] * 2, **{**SIZES, "weight_grad_bytes": 90}), Partition((0, 2)), split_backward()
    )
    assert rank.activations == 180 + 180 + 200
    assert predicted.in_flight(split_backward(), 0) == (2, 3)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b"])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 3), (2, 5), (4, 4), (4, 9)])
def test_equal_layers_agree_with_the_simulated_peak(name, ranks, micro_batches, make_profile):
    schedule = build(name, ranks=ranks, micro_batches=micro_batches)
    parts = schedule.num_layer_groups
    memory = predict_memory(make_profile([1.0] * parts, **SIZES), Partition(tuple(range(parts + 1))), schedule)
    share = 100 * schedule.stages_per_rank
    peaks = simulate(schedule).peak_activations
    assert [rank.activations for rank in memory] == pytest.approx([share * peak for peak in peaks])


@settings(max_examples=60)
@given(
    st.sampled_from(["gpipe", "1f1b", "interleaved-1f1b"]),
    st.integers(1, 3),
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9)), min_size=6, max_size=9),
)
def test_activations_equal_a_walk_along_the_row(name, ranks, micro_batches, sizes):
    schedule = build(name, ranks=ranks, micro_batches=micro_batches)
    layers = tuple(
        LayerCost(name="", type="", forward=1, input_grad=1, weight_grad=1, activation_bytes=a, output_bytes=o)
        for a, o in sizes
    )
    profile = Profile(layers=layers)
    partition = make_partition("profile", schedule, profile=profile)
    for rank, row in enumerate(schedule.rows):
        alive, peak = 0, 0
        for action in row:
            size = sum(layers[i].activation_bytes for i in partition.layers_of(action.stage))
            alive += size if action.kind is Kind.F else -size
            peak = max(peak, alive)
        assert predict_memory(profile, partition, schedule)[rank].activations == peak


# Caps.


@settings(max_examples=80)
@given(
    st.sampled_from(["gpipe", "1f1b", "interleaved-1f1b"]),
    st.integers(2, 3),
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9), st.integers(0, 20)), min_size=6, max_size=10),
    st.integers(300, 4000),
)
def test_what_is_cut_for_a_cap_keeps_within_it(name, ranks, micro_batches, sizes, cap):
    schedule = build(name, ranks=ranks, micro_batches=micro_batches)
    layers = tuple(
        LayerCost(
            name="",
            type="",
            forward=1 + a % 7,
            input_grad=1,
            weight_grad=1,
            activation_bytes=a,
            output_bytes=o,
            parameters=p,
            parameter_bytes=4 * p,
        )
        for a, o, p in sizes
    )
    profile = Profile(layers=layers)
    for method in ("profile", "uniform", "parameters"):
        try:
            partition = make_partition(method, schedule, profile=profile, memory_cap=cap)
        except OutOfMemory:
            continue
        assert max(rank.total for rank in predict_memory(profile, partition, schedule)) <= cap


def test_a_cap_moves_layers_to_ranks_that_hold_fewer_micro_batches(make_profile):
    schedule = build("1f1b", ranks=4, micro_batches=8)
    profile = make_profile([1.0] * 32, activation_bytes=1)
    found = [make_partition("uniform", schedule, profile=profile, memory_cap=cap).sizes for cap in (40, 24, 20)]
    assert found == [(8, 8, 8, 8), (6, 8, 9, 9), (5, 6, 10, 11)]
    assert make_partition("profile", schedule, profile=profile, memory_cap=20).sizes == (5, 6, 10, 11)
    assert make_partition("uniform", schedule, profile=profile, memory_cap=[20, 40, 40, 40]).sizes == (5, 9, 9, 9)


def test_a_cap_that_nothing_meets(make_profile):
    schedule = build("1f1b", ranks=2, micro_batches=8)
    profile = make_profile([1.0] * 4, **SIZES)
    with pytest.raises(OutOfMemory, match="4 layers into 2 parts"):
        make_partition("profile", schedule, profile=profile, memory_cap=500)
    with pytest.raises(OutOfMemory, match="messages alone need 14"):
        make_partition("profile", schedule, profile=profile, memory_cap=14)
    with pytest.raises(PartitionError, match="one for each of 2 ranks"):
        make_partition("profile", schedule, profile=profile, memory_cap=[500, 500, 500])
    with pytest.raises(PartitionError, match="memory_cap needs a profile"):
        make_partition("uniform", schedule, layers=4, memory_cap=500)


def test_copies_of_a_group_share_their_ranks():
    rows = [["0F0", "3F1", "3B1", "0B0"], ["2F1", "1F0", "1B0", "2B1"]]
    schedule = Schedule.from_rows(
        "two-copies",
        [map(Action.parse, row) for row in rows],
        (0, 1, 1, 0),
        routes=((0, 1), (2, 3)),
        layer_group_of_stage=(0, 1, 0, 1),
    )
    assert predicted.carriers(schedule) == (0, 0)
    assert predicted.carriers(build("interleaved-1f1b", ranks=2, micro_batches=2)) == (0, 1, 0, 1)

"""Layers to recompute under a memory limit: never over it, and no slower than the best of all choices."""

from __future__ import annotations

import random
import time
from functools import partial
from itertools import chain, combinations

import pytest

from partition import LayerCost, OutOfMemory, Partition, Profile, StateBytes, make_partition, predict_memory
from partition.predict import predict_timeline
from partition.recompute import choose_cuts_and_recomputed, choose_recomputed, recomputed
from schedules import Schedule, build

NO_STATE = StateBytes(gradient=0.0, optimizer=0.0)
SHAPES = [("1f1b", 3, 1), ("gpipe", 2, 1), ("interleaved-1f1b", 2, 2), ("zb-h1", 3, 1), ("zb-v", 2, 2)]


def profile_of(layers: int, seed: int) -> Profile:
    draw = random.Random(seed)
    costs = [
        LayerCost(
            name=f"layers.{index}",
            type="Layer",
            forward=draw.uniform(0.5, 2.0),
            input_grad=draw.uniform(0.5, 2.0),
            weight_grad=draw.uniform(0.2, 1.0),
            activation_bytes=draw.randrange(10, 200),
            weight_grad_bytes=draw.randrange(0, 40),
            output_bytes=draw.randrange(5, 15),
        )
        for index in range(layers)
    ]
    return Profile(layers=tuple(costs))


def need(profile: Profile, partition: Partition, schedule: Schedule, layers: tuple[int, ...] = ()) -> list[float]:
    return [rank.total for rank in predict_memory(recomputed(profile, layers), partition, schedule, NO_STATE)]


def limits(profile: Profile, partition: Partition, schedule: Schedule) -> list[float]:
    """Between what is needed with everything recomputed and with nothing."""
    most = max(need(profile, partition, schedule))
    least = max(need(profile, partition, schedule, tuple(range(len(profile.layers)))))
    return [least, least + 0.3 * (most - least), least + 0.7 * (most - least), most]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("name", "ranks", "stages"), SHAPES)
def test_no_choice_of_a_rank_takes_less_time(name: str, ranks: int, stages: int, seed: int) -> None:
    schedule = build(name, ranks=ranks, micro_batches=5, stages_per_rank=stages)
    profile = profile_of(7, seed)
    partition = make_partition("uniform", schedule, layers=7)
    for limit in limits(profile, partition, schedule):
        chosen = choose_recomputed(profile, partition, schedule, limit, NO_STATE)
        assert all(total <= limit * (1 + 1e-12) for total in need(profile, partition, schedule, chosen))
        for rank in range(ranks):
            own = [
                layer
                for stage in schedule.stages_of_rank(rank)
                for layer in partition.layers_of(schedule.layer_group_of_stage[stage])
            ]
            fitting = [
                sum(profile.layers[layer].forward for layer in some)
                for some in chain.from_iterable(combinations(own, count) for count in range(len(own) + 1))
                if need(profile, partition, schedule, some)[rank] <= limit * (1 + 1e-12)
            ]
            spent = sum(profile.layers[layer].forward for layer in chosen if layer in own)
            assert spent == pytest.approx(min(fitting), rel=1e-9)


def test_nothing_is_recomputed_where_all_fits_and_everything_of_use_where_it_hardly_does() -> None:
    schedule = build("1f1b", ranks=2, micro_batches=4)
    profile, partition = profile_of(6, 0), Partition((0, 3, 6))
    assert choose_recomputed(profile, partition, schedule, 1e9, NO_STATE) == ()
    tight = limits(profile, partition, schedule)[0]
    first = choose_recomputed(profile, partition, schedule, tight, NO_STATE)
    assert max(need(profile, partition, schedule, first)) <= tight
    with pytest.raises(OutOfMemory, match=r"even with all of its layers recomputed.*memory_limit is \d+; raise"):
        choose_recomputed(profile, partition, schedule, 0.9 * tight, NO_STATE)


def test_a_recomputed_layer_keeps_its_input_and_runs_forward_in_its_backward() -> None:
    before = profile_of(3, 1).layers
    after = recomputed(profile_of(3, 1), (1,)).layers
    assert (after[0], after[2]) == (before[0], before[2])
    assert after[1].input_grad == before[1].input_grad + before[1].forward
    assert after[1].activation_bytes == min(before[0].output_bytes, before[1].activation_bytes)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "ranks", "stages"), SHAPES)
def test_cuts_are_chosen_together_with_it(name: str, ranks: int, stages: int, seed: int) -> None:
    schedule = build(name, ranks=ranks, micro_batches=6, stages_per_rank=stages)
    profile = profile_of(12, seed)
    cut = partial(_cut, schedule)
    begun = cut(profile)
    for limit in limits(profile, begun, schedule)[1:]:
        partition, layers = choose_cuts_and_recomputed(profile, schedule, cut, limit, NO_STATE)
        assert max(need(profile, partition, schedule, layers)) <= limit * (1 + 1e-12)
        fixed = choose_recomputed(profile, begun, schedule, limit, NO_STATE)
        steps = [
            predict_timeline(recomputed(profile, which), cuts, schedule).step_time
            for which, cuts in ((layers, partition), (fixed, begun))
        ]
        assert steps[0] <= steps[1] * (1 + 1e-12)
        assert (partition, layers) == choose_cuts_and_recomputed(profile, schedule, cut, limit, NO_STATE)


def _cut(schedule: Schedule, profile: Profile) -> Partition:
    return make_partition("profile", schedule, profile=profile)


def test_many_layers_take_no_time_worth_waiting_for() -> None:
    schedule = build("interleaved-1f1b", ranks=16, micro_batches=32, stages_per_rank=2)
    profile = profile_of(200, 0)
    partition = make_partition("uniform", schedule, layers=200)
    limit = limits(profile, partition, schedule)[1]
    started = time.process_time()
    chosen = choose_recomputed(profile, partition, schedule, limit, NO_STATE)
    assert max(need(profile, partition, schedule, chosen)) <= limit
    assert time.process_time() - started < 60  # some seconds here; a search without an end would take for ever

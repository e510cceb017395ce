"""Every method of cutting, and what it says to arguments it cannot use."""

import itertools
import random

import numpy as np
import pytest

from partition import (
    FewerLayersThanStages,
    LayerCost,
    Partition,
    PartitionError,
    Profile,
    ProfileError,
    UnknownMethod,
    make_partition,
    predict_timeline,
    refine,
    split,
)
from schedules import build

FOUR = build("1f1b", ranks=4, micro_batches=8)
TWO = build("1f1b", ranks=2, micro_batches=8)
LOOP = build("interleaved-1f1b", ranks=2, micro_batches=8, stages_per_rank=2)
TYPES = ["Embedding", "Block", "Dropout", "Block", "Block", "Dropout", "Block", "LayerNorm", "Head"]


def test_uniform_balances_layers_of_a_rank():
    assert make_partition("uniform", FOUR, layers=12).cuts == (0, 3, 6, 9, 12)
    assert make_partition("uniform", LOOP, layers=10).sizes == (2, 2, 3, 3)


def test_parameters():
    assert make_partition("parameters", TWO, parameters=[100, 1, 1, 1, 97]).cuts == (0, 1, 5)
    # Without any, the number of layers decides.
    assert make_partition("parameters", TWO, parameters=[0] * 6).cuts == (0, 3, 6)


def test_type_balances_the_layers_that_match():
    partition = make_partition("type:block", TWO, types=TYPES)
    assert [sum(TYPES[i] == "Block" for i in partition.layers_of(part)) for part in range(2)] == [2, 2]
    assert make_partition("type:Emb|Head", TWO, types=TYPES).sizes in [(4, 5), (5, 4)]
    assert make_partition("type:^Block$", FOUR, types=TYPES).parts == 4


def test_fewer_matches_than_parts_leave_none_empty():
    assert min(make_partition("type:Embedding", FOUR, types=TYPES).sizes) >= 1


@pytest.mark.parametrize("points", [(2, 5, 7), [0, 2, 5, 7, 9]])
def test_cut_points_with_or_without_the_ends(points):
    assert make_partition(points, FOUR, layers=9) == Partition((0, 2, 5, 7, 9))


def test_cut_points_may_leave_stages_empty():
    assert make_partition((0, 0, 9), FOUR, layers=9).sizes == (0, 0, 9, 0)
    assert make_partition((), build("1f1b", ranks=1, micro_batches=1), layers=9).cuts == (0, 9)


@pytest.mark.parametrize("points", [(2, 5), (5, 2, 7), (2, 5, 10), (1, 2, 5, 7, 9), (0, 2, 5, 7, 8), (-1, 2, 3)])
def test_cut_points_that_are_none(points):
    with pytest.raises(PartitionError, match=r"for 4 stages of 9 layers give 3 cut points from 0 to 9"):
        make_partition(points, FOUR, layers=9)


def test_profile_cuts_by_time_where_parameters_mislead(make_profile):
    layers = [
        LayerCost(name="", type="", forward=t, input_grad=t, weight_grad=t, parameters=p)
        for t, p in [(0.1, 1000), (0.1, 10), (1.0, 10), (1.0, 10), (1.0, 10), (1.0, 1000)]
    ]
    profile = Profile(layers=tuple(layers))
    assert make_partition("profile", TWO, profile=profile).cuts == (0, 4, 6)
    assert make_partition("parameters", TWO, profile=profile).cuts == (0, 3, 6)


def test_inference_is_cut_by_forward_alone():
    layers = tuple(
        LayerCost(name="", type="", forward=f, input_grad=i, weight_grad=0) for f, i in [(3, 0), (1, 9), (1, 9), (1, 9)]
    )
    schedule = build("forward-only", ranks=2, micro_batches=4)
    assert make_partition("profile", schedule, profile=Profile(layers=layers)).cuts == (0, 1, 4)
    assert make_partition("profile", TWO, profile=Profile(layers=layers)).cuts == (0, 2, 4)


def test_a_slow_rank_gets_fewer_layers(make_profile):
    profile = make_profile([1.0] * 11).model_copy(update={"speeds": (1.0, 1.0, 1 / 1.5, 1.0)})
    assert make_partition("profile", FOUR, profile=profile).sizes == (3, 3, 2, 3)
    assert make_partition("uniform", FOUR, profile=profile).sizes == make_partition("uniform", FOUR, layers=11).sizes
    other = profile.model_copy(update={"speeds": (1.0, 0.1)})  # measured on another number of ranks
    alike = profile.model_copy(update={"speeds": ()})
    assert make_partition("profile", FOUR, profile=other) == make_partition("profile", FOUR, profile=alike)


def test_of_a_group_on_two_ranks_the_slower_one_counts(make_profile):
    twice = build("dualpipe", ranks=4, micro_batches=8)  # groups 0 and 3 are on ranks 0 and 3, 1 and 2 on the others
    profile = make_profile([1.0] * 12).model_copy(update={"speeds": (1.0, 1.0, 0.5, 1.0)})
    sizes = make_partition("profile", twice, profile=profile).sizes
    assert (sizes[0] + sizes[3], sizes[1] + sizes[2]) == (8, 4)


def random_profile(seed, layers):
    r = random.Random(seed)
    return Profile(
        layers=tuple(
            LayerCost(
                name="",
                type="",
                forward=r.uniform(0.2, 2),
                input_grad=r.uniform(0.2, 2),
                weight_grad=r.uniform(0.2, 2),
            )
            for _ in range(layers)
        ),
        hop=0.05,
    )


def step(profile, cuts, schedule):
    return predict_timeline(profile, Partition(cuts), schedule).step_time


@pytest.mark.parametrize("schedule", [TWO, FOUR, LOOP, build("gpipe", ranks=3, micro_batches=4)], ids=lambda s: s.name)
@pytest.mark.parametrize("seed", range(4))
def test_of_few_cuts_the_best_by_simulation_is_taken(schedule, seed):
    profile = random_profile(seed, 9)
    cuts = make_partition("profile", schedule, profile=profile).cuts
    every = ((0, *inner, 9) for inner in itertools.combinations(range(1, 9), schedule.num_layer_groups - 1))
    assert step(profile, cuts, schedule) == pytest.approx(min(step(profile, c, schedule) for c in every), rel=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_of_many_cuts_none_a_layer_away_is_quicker(seed):
    schedule = build("interleaved-1f1b", ranks=4, micro_batches=8, stages_per_rank=2)
    profile = random_profile(seed, 26)
    cuts = make_partition("profile", schedule, profile=profile).cuts
    reached = step(profile, cuts, schedule)
    assert all(step(profile, near, schedule) >= reached * (1 - 1e-9) for near in refine.neighbours(cuts))
    weights = [layer.seconds for layer in profile.layers]
    for start in (split(weights, 8, stages_per_rank=2), split(weights, 8)):
        assert reached <= step(profile, start, schedule)


def test_the_work_is_limited(make_profile, monkeypatch):
    tried = []
    predict = refine.predict_timeline
    monkeypatch.setattr(refine, "predict_timeline", lambda *given: tried.append(given) or predict(*given))
    large = build("1f1b", ranks=8, micro_batches=2000)
    make_partition("profile", large, profile=random_profile(0, 40))
    assert 1 <= len(tried) <= 3
    tried.clear()
    make_partition("profile", FOUR, profile=random_profile(0, 40))
    assert len(tried) <= refine.TRIALS


def test_nearly_equal_profiles_give_nearly_equal_steps():
    profile = random_profile(0, 16)
    noise = np.random.default_rng(0)
    shaken = profile.model_copy(
        update={
            "layers": tuple(
                layer.model_copy(update={"forward": layer.forward * noise.uniform(0.99, 1.01)})
                for layer in profile.layers
            )
        }
    )
    one, other = (make_partition("profile", FOUR, profile=p).cuts for p in (profile, shaken))
    assert step(profile, other, FOUR) <= 1.03 * step(profile, one, FOUR)


def test_one_rank_and_one_layer_a_rank(make_profile):
    one = build("1f1b", ranks=1, micro_batches=3)
    assert make_partition("profile", one, profile=make_profile([1.0] * 3)).cuts == (0, 3)
    assert make_partition("profile", FOUR, profile=make_profile([1.0] * 4)).cuts == (0, 1, 2, 3, 4)


@pytest.mark.parametrize("method", ["profile", "parameters", "uniform", "type:Block"])
def test_too_few_layers(method, make_profile):
    with pytest.raises(FewerLayersThanStages, match="3 layers cannot fill 4 stages"):
        make_partition(method, FOUR, profile=make_profile([1.0] * 3))


@pytest.mark.parametrize(
    ("method", "error", "words"),
    [
        ("profil", UnknownMethod, "did you mean 'profile'.*cut points"),
        ("type", UnknownMethod, "did you mean 'type:REGEX'"),
        ("xyz", UnknownMethod, "partition = 'xyz': give one of profile, parameters"),
        ("profile", ProfileError, "needs measured costs"),
        ("parameters", PartitionError, "needs the number of parameters"),
        ("type:Blok", PartitionError, "did you mean 'type:Block'.*the types are Block, Dropout"),
        ("type:", PartitionError, "matches no layer"),
        ("type:(", PartitionError, "not a regular expression"),
    ],
)
def test_methods_that_cannot_be_used(method, error, words):
    with pytest.raises(error, match=words):
        make_partition(method, FOUR, types=TYPES)


def test_what_describes_the_layers_has_to_agree(make_profile):
    with pytest.raises(PartitionError, match="give layers, types, parameters or a profile"):
        make_partition("uniform", FOUR)
    with pytest.raises(PartitionError, match="disagree on the number of layers: layers 9, parameters 8"):
        make_partition("uniform", FOUR, layers=9, parameters=[1] * 8)
    with pytest.raises(ProfileError, match="the profile has 8 layers, the model 9"):
        make_partition("uniform", FOUR, layers=9, profile=make_profile([1.0] * 8))
    with pytest.raises(PartitionError, match="needs the type of each layer"):
        make_partition("type:Block", FOUR, layers=9)

"""The split against brute force, on examples that are known, and at scale."""

import itertools
import math
import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partition import FewerLayersThanStages, OutOfMemory, PartitionError, split
from partition import split_line as line
from partition.split_bound import good_split, reach_of_best

KINDS = {
    "integers": lambda r: r.randint(0, 20),
    "floats": lambda r: r.uniform(0.5, 1.5),
    "zeros": lambda r: r.choice([0, 0, 1, 3]),
    "equal": lambda r: 0.1,
    "ratios": lambda r: 10.0 ** r.uniform(-6, 6),
    "giants": lambda r: r.choice([1, 2, 1, 50, 53]),
}


def sums(weights, cuts):
    return [math.fsum(weights[a:b]) for a, b in itertools.pairwise(cuts)]


def by_rank(values, ranks):
    return [math.fsum(v for v, rank in zip(values, ranks, strict=True) if rank == r) for r in sorted(set(ranks))]


def objective(weights, cuts, ranks, speeds=None):
    """The bottleneck, the evenness of ranks and the evenness of parts."""
    parts = sums(weights, cuts)
    if speeds is not None:
        parts = [part / speeds[rank] for part, rank in zip(parts, ranks, strict=True)]
    loads = by_rank(parts, ranks)
    return max(loads), math.fsum(x * x for x in loads), math.fsum(x * x for x in parts)


def smaller(one, other):
    """Whether one objective is before the other, the first number first; rounding makes no difference."""
    for a, b in zip(one, other, strict=True):
        if not math.isclose(a, b, rel_tol=1e-12):
            return a < b
    return False


def brute_force(weights, ranks, fits=lambda cuts: True, speeds=None):
    best = None
    for inner in itertools.combinations(range(1, len(weights)), len(ranks) - 1):
        cuts = (0, *inner, len(weights))
        if fits(cuts) and (best is None or smaller(objective(weights, cuts, ranks, speeds), best)):
            best = objective(weights, cuts, ranks, speeds)
    return best


def case(seed):
    """A random list, its placement, and memory with caps in some of three forms, or none."""
    r = random.Random(seed)
    ranks, chunks = r.randint(1, 4), r.randint(1, 3)
    parts = ranks * chunks
    layers = r.randint(parts, max(parts, 11))
    weights = [KINDS[r.choice(list(KINDS))](r) for _ in range(layers)] if r.random() < 0.2 else []
    weights = weights or list(map(KINDS[r.choice(list(KINDS))], [r] * layers))
    placement = [part % ranks for part in range(parts)]
    if r.random() < 0.4:
        r.shuffle(placement)
    if r.random() < 0.5:
        return weights, placement, {}
    memory = [[r.randint(1, 9) for _ in range(layers)] for _ in range(parts)]
    limits = {"memory": memory if r.random() < 0.5 else memory[0]}
    if r.random() < 0.6:
        limits["caps"] = [r.randint(8, 60) for _ in range(parts)]
    if "caps" not in limits or r.random() < 0.5:
        limits["rank_caps"] = [r.randint(10, 70) for _ in range(ranks)]
    return weights, placement, limits


def within(limits, placement, layers):
    """A function that says whether cuts keep within the limits."""
    if not limits:
        return lambda cuts: True
    memory = np.broadcast_to(limits["memory"], (len(placement), layers))

    def fits(cuts):
        held = [memory[part, a:b].sum() for part, (a, b) in enumerate(itertools.pairwise(cuts))]
        return all(h <= c for h, c in zip(held, limits.get("caps", held), strict=True)) and all(
            h <= c for h, c in zip(by_rank(held, placement), limits.get("rank_caps", [math.inf] * 4), strict=False)
        )

    return fits


@pytest.mark.parametrize("hundred", range(10))
def test_equals_brute_force_on_1000_random_lists(hundred):
    compared = refused = 0
    for seed in range(100 * hundred, 100 * hundred + 100):
        weights, placement, limits = case(seed)
        fits = within(limits, placement, len(weights))
        best = brute_force(weights, placement, fits)
        if best is None:
            with pytest.raises(OutOfMemory):
                split(weights, len(placement), rank_of_part=placement, **limits)
            refused += 1
            continue
        cuts = split(weights, len(placement), rank_of_part=placement, **limits)
        assert fits(cuts)
        if any(weights):
            assert objective(weights, cuts, placement) == pytest.approx(best, rel=1e-12), (seed, cuts)
        compared += 1
    assert compared > 75
    assert refused > 0


@pytest.mark.parametrize("hundred", range(4))
def test_equals_brute_force_on_ranks_of_different_speed(hundred):
    compared = 0
    for seed in range(100 * hundred, 100 * hundred + 100):
        weights, placement, limits = case(seed)
        chance = random.Random(-seed)
        speeds = [chance.choice([1, 2, 0.5, 1 / 1.5, 0.1, 1.03]) for _ in set(placement)]
        fits = within(limits, placement, len(weights))
        best = brute_force(weights, placement, fits, speeds)
        if best is None:
            with pytest.raises(OutOfMemory):
                split(weights, len(placement), rank_of_part=placement, speeds=speeds, **limits)
            continue
        cuts = split(weights, len(placement), rank_of_part=placement, speeds=speeds, **limits)
        assert fits(cuts)
        if any(weights):
            assert objective(weights, cuts, placement, speeds) == pytest.approx(best, rel=1e-11), (seed, cuts)
        compared += 1
    assert compared > 75


def test_a_slower_rank_gets_fewer_layers():
    assert split([1] * 11, 4, speeds=[1, 1, 1 / 1.5, 1]) == (0, 3, 6, 8, 11)
    assert split([1] * 10, 4, stages_per_rank=2, speeds=[0.25, 1]) == (0, 1, 5, 6, 10)
    assert split([1] * 8, 4, speeds=[2, 2, 2, 2]) == split([1] * 8, 4)


@settings(max_examples=200)
@given(st.data())
def test_equals_brute_force_on_lists_hypothesis_finds(data):
    weights = data.draw(st.lists(st.integers(0, 2**40), min_size=1, max_size=9))
    parts = data.draw(st.integers(1, len(weights)))
    cuts = split(weights, parts)
    assert (cuts[0], cuts[-1], len(cuts)) == (0, len(weights), parts + 1)
    assert all(a < b for a, b in itertools.pairwise(cuts))
    if any(weights):
        assert objective(weights, cuts, range(parts)) == pytest.approx(brute_force(weights, range(parts)), rel=1e-12)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 30) | st.integers(500, 510), min_size=12, max_size=60), st.integers(2, 9), st.booleans())
def test_every_form_of_the_search_finds_the_same_evenness(weights, parts, bounded):
    """One matrix a part, or row by row between solved rows; with bounds from a good split, or without."""
    total = np.concatenate(([0], np.cumsum(weights)))
    starts = line.within(total, line.least_bottleneck(total, parts), parts, None)
    first, last = line.hull(starts)
    plain = line.most_even(total, starts, first, last)
    dense, line.DENSE = line.DENSE, 0
    try:
        if bounded:
            nearest, furthest = reach_of_best(total, good_split(total, starts, first, last))
            first, last = np.maximum(first, nearest), np.minimum(last, furthest)
        rows = line.most_even(total, starts, first, last)
    finally:
        line.DENSE = dense
    assert objective(weights, rows, range(parts)) == objective(weights, plain, range(parts))


@settings(max_examples=200)
@given(st.lists(st.integers(0, 9) | st.integers(20, 24) | st.integers(60, 90), min_size=3, max_size=9), st.data())
def test_no_split_as_even_as_a_known_one_lies_out_of_reach(weights, data):
    layers = len(weights)
    parts = data.draw(st.integers(2, layers))
    splits = [(0, *inner, layers) for inner in itertools.combinations(range(1, layers), parts - 1)]
    known = np.array(data.draw(st.sampled_from(splits)))
    total = np.concatenate(([0], np.cumsum(weights)))
    first, last = reach_of_best(total, known)
    squares = {cuts: sum(int(total[b] - total[a]) ** 2 for a, b in itertools.pairwise(cuts)) for cuts in splits}
    for cuts in splits:
        if squares[cuts] <= squares[tuple(known.tolist())]:
            assert (first <= cuts).all()
            assert (cuts <= last).all()


def test_the_ends_are_in_reach_whatever_rounding_does():
    # 7 parts of 61 / 7 add up to less than 61.
    total = np.concatenate(([0], np.cumsum([6, 7, 7, 7, 7, 7, 7, 6, 7])))
    first, last = reach_of_best(total, np.array([0, 2, 3, 4, 6, 7, 8, 9]))
    assert (first[0], last[0], first[-1], last[-1]) == (0, 0, 9, 9)


def test_minimises_the_largest_part_not_the_difference_between_parts():
    weights = [3, 15, 7, 8, 6, 4, 2, 7]
    cuts = split(weights, 5)
    # Minimising largest - smallest gives 18 here.
    assert sums(weights, cuts) == [3, 15, 15, 10, 9]
    assert cuts == (0, 1, 2, 4, 6, 8)


def test_the_most_even_among_equal_bottlenecks():
    # The 9 decides the bottleneck; the rest could be 5 + 1 or 4 + 2 or 3 + 3.
    assert split([1, 1, 1, 1, 1, 1, 9], 3) == (0, 3, 6, 7)


@pytest.mark.parametrize(("cap", "sizes"), [(40, [8, 8, 8, 8]), (24, [6, 8, 9, 9]), (20, [5, 6, 10, 11])])
def test_memory_caps_of_1f1b_move_layers_to_later_ranks(cap, sizes):
    in_flight = [[held] * 32 for held in (4, 3, 2, 1)]
    cuts = split([1] * 32, 4, memory=in_flight, caps=cap)
    assert np.diff(cuts).tolist() == sizes
    assert split([1] * 32, 4, memory=in_flight, rank_caps=[cap] * 4) == cuts


def test_a_cap_counts_to_the_last_digit():
    assert split([1, 1, 1, 1], 2, memory=[0.1, 0.1, 0.1, 0.4], caps=[0.3, 0.4]) == (0, 3, 4)


def test_rank_sums_are_balanced_first_and_parts_second():
    # Parts 0 and 2 are on rank 0: 4 + 1 against 2 + 3, though 4 | 2 | 3 + ... would be more even by part.
    weights = [4, 2, 1, 3]
    assert split(weights, 4, stages_per_rank=2) == (0, 1, 2, 3, 4)
    even = [1.0] * 8
    assert split(even, 4, stages_per_rank=2) == (0, 2, 4, 6, 8)
    assert split([5, 1, 1, 1, 1, 1], 4, stages_per_rank=2) == (0, 1, 3, 4, 6)


def test_placement_of_a_v():
    # Rank 0 holds the first and the last part.
    weights = [1, 3, 3, 3, 3, 1, 1, 1]
    cuts = split(weights, 4, rank_of_part=[0, 1, 1, 0])
    assert by_rank(sums(weights, cuts), [0, 1, 1, 0]) == [8, 8]


def test_weights_without_any_are_counted():
    assert split([0.0] * 9, 3) == (0, 3, 6, 9)


@pytest.mark.parametrize("scale", [1e-300, 1e-9, 1.0, 1e300])
def test_the_unit_does_not_matter(scale):
    weights = [3, 15, 7, 8, 6, 4, 2, 7]
    assert split([w * scale for w in weights], 5) == split(weights, 5)


def test_one_layer_a_part_and_one_part():
    assert split([5, 1, 2], 3) == (0, 1, 2, 3)
    assert split([5, 1, 2], 1) == (0, 3)
    assert split([5, 1, 2], 3, stages_per_rank=3) == (0, 1, 2, 3)


def test_too_few_layers_name_both_numbers_and_the_settings():
    with pytest.raises(FewerLayersThanStages, match=r"3 layers cannot fill 4 stages.*stages_per_rank") as caught:
        split([1, 2, 3], 4)
    assert (caught.value.layers, caught.value.stages) == (3, 4)


def test_nothing_fits_names_the_factor_that_would():
    with pytest.raises(OutOfMemory, match=r"8 layers into 2 parts.*make them 2 times as large"):
        split([1] * 8, 2, memory=[1] * 8, caps=2)
    with pytest.raises(OutOfMemory, match="raise them"):
        split([1] * 8, 4, memory=[1] * 8, rank_caps=3, stages_per_rank=2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([], 1), "one number a layer"),
        (([[1.0]], 1), r"shape \(1, 1\)"),
        (([1, -1], 1), "weight of layer 1 is -1"),
        (([1, math.nan], 1), "weight of layer 1 is nan"),
        (([1, math.inf], 1), "weight of layer 1 is inf"),
        (([1, 2], 0), "0 parts"),
    ],
)
def test_bad_weights(arguments, words):
    with pytest.raises(PartitionError, match=words):
        split(*arguments)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stages_per_rank": 2}, "3 parts, 2 a rank"),
        ({"rank_of_part": [0, 1]}, "each of 3 parts"),
        ({"rank_of_part": [0, -1, 1]}, "0 or more"),
        ({"caps": 3}, "go together"),
        ({"memory": [1, 1, 1]}, "go together"),
        ({"memory": [1, 1], "caps": 3}, r"\(3,\) or \(3, 3\)"),
        ({"memory": [1, 1, math.nan], "caps": 3}, "finite"),
        ({"memory": [1, 1, 1], "caps": [3, 3]}, "one for each of 3 parts"),
        ({"memory": [1, 1, 1], "rank_caps": 0}, "positive"),
        ({"speeds": [1, 1]}, "positive number for each of 3 ranks"),
        ({"speeds": [1, 0, 1]}, "positive number for each of 3 ranks"),
    ],
)
def test_bad_options(options, words):
    with pytest.raises(PartitionError, match=words):
        split([1, 2, 3], 3, **options)


RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize(
    "weights",
    [RANDOM.uniform(0.5, 1.5, 20_000), RANDOM.lognormal(0, 1, 20_000), np.ones(20_000), np.arange(20_000)],
    ids=["uniform", "lognormal", "equal", "rising"],
)
def test_20000_layers_into_256_parts_take_milliseconds(weights):
    used = []
    for _ in range(3):
        begin = time.process_time()
        cuts = split(weights, 256)
        used.append(time.process_time() - begin)
    # About 0.02 on an idle core. A slower search than this one takes seconds.
    assert min(used) < 0.2
    parts = np.diff(np.concatenate(([0.0], np.cumsum(weights)))[list(cuts)])
    assert parts.max() <= weights.sum() / 256 + weights.max()
    assert len(cuts) == 257


def test_one_layer_above_all_others_at_scale():
    weights = np.ones(4000)
    weights[1234] = 1e6
    parts = np.add.reduceat(weights, split(weights, 64)[:-1])
    # The giant stands alone; what is left of it and right of it is shared out evenly: 1234 / 20 and 2765 / 43 or so.
    assert sorted(parts)[-1] == 1e6
    assert sorted(parts)[-2] - min(parts) <= 4


def test_many_chunks_keep_ranks_near_their_share():
    weights = np.random.default_rng(1).uniform(0.8, 1.2, 260)
    cuts = split(weights, 64, stages_per_rank=4)
    loads = np.add.reduceat(weights, cuts[:-1]).reshape(4, 16).sum(axis=0)
    assert loads.max() < 1.06 * loads.mean()

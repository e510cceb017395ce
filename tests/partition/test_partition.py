"""Partitions and the moves between them."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partition import Move, Moves, Partition, PartitionError
from schedules import Action, Schedule, build

CUTS = st.lists(st.integers(0, 12), max_size=5).map(lambda inner: (0, *sorted(inner), 12))


THREE = st.lists(st.integers(0, 12), min_size=2, max_size=2).map(lambda inner: (0, *sorted(inner), 12))


@given(CUTS)
def test_parts_and_layers_say_the_same(cuts):
    partition = Partition(cuts)
    assert [partition.part_of(layer) for layer in range(12)] == [
        part for part in range(partition.parts) for _ in partition.layers_of(part)
    ]
    assert sum(partition.sizes) == partition.layers == 12


def test_in_words():
    assert str(Partition((0, 3, 3, 4, 8))) == "0-2 | - | 3 | 4-7"


@pytest.mark.parametrize("cuts", [(), (0,), (1, 2), (0, 3, 2)])
def test_cuts_that_are_none(cuts):
    with pytest.raises(PartitionError, match="begin with 0 and never go down"):
        Partition(cuts)


def test_parts_and_layers_beyond_the_ends():
    partition = Partition((0, 2, 3))
    for part in (-1, 2):
        with pytest.raises(PartitionError, match="parts 0 to 1"):
            partition.layers_of(part)
    for layer in (-1, 3):
        with pytest.raises(PartitionError, match="layers 0 to 2"):
            partition.part_of(layer)


def test_moves_in_words():
    schedule = build("1f1b", ranks=3, micro_batches=4)
    moves = Moves.between(Partition((0, 4, 8, 9)), Partition((0, 2, 3, 9)), schedule)
    assert moves.text() == "rank 0 -> rank 1: layer 2\nrank 0 -> rank 2: layer 3\nrank 1 -> rank 2: layers 4-7"
    assert moves.moves[0] == Move(layer=2, source=0, target=1)
    assert Moves.between(Partition((0, 1, 2, 9)), Partition((0, 1, 2, 9)), schedule).text() == "no layer moves"


def test_a_layer_that_changes_its_stage_but_not_its_rank_stays():
    schedule = build("interleaved-1f1b", ranks=2, micro_batches=4, stages_per_rank=2)
    moves = Moves.between(Partition((0, 2, 2, 4, 6)), Partition((0, 1, 1, 4, 6)), schedule)
    assert moves.moves == ()


def test_moves_to_more_ranks():
    two, four = (build("1f1b", ranks=ranks, micro_batches=4) for ranks in (2, 4))
    moves = Moves.between(Partition((0, 2, 4)), Partition((0, 1, 2, 3, 4)), two, four)
    assert moves.text() == "rank 0 -> rank 1: layer 1\nrank 1 -> rank 2: layer 2\nrank 1 -> rank 3: layer 3"


def test_copies_are_fetched_from_the_lowest_rank_that_has_one():
    one = build("1f1b", ranks=2, micro_batches=2)
    rows = [["0F0", "3F1", "3B1", "0B0"], ["2F1", "1F0", "1B0", "2B1"]]
    both = Schedule.from_rows(
        "two-copies",
        [map(Action.parse, row) for row in rows],
        (0, 1, 1, 0),
        routes=((0, 1), (2, 3)),
        layer_group_of_stage=(0, 1, 0, 1),
    )
    cuts = Partition((0, 1, 3))
    assert Moves.between(cuts, cuts, one, both).moves == (Move(0, 0, 1), Move(1, 1, 0), Move(2, 1, 0))
    assert Moves.between(cuts, cuts, both, one).moves == ()
    assert Moves.between(cuts, Partition((0, 2, 3)), both, both).moves == ()


@settings(max_examples=40)
@given(THREE, THREE)
def test_moves_lead_from_one_to_the_other(old, new):
    schedule = build("1f1b", ranks=3, micro_batches=3)
    place = {layer: Partition(old).part_of(layer) for layer in range(12)}
    for layer, source, target in Moves.between(Partition(old), Partition(new), schedule).moves:
        assert place[layer] == source != target
        place[layer] = target
    assert place == {layer: Partition(new).part_of(layer) for layer in range(12)}


def test_partitions_that_have_nothing_in_common():
    schedule = build("1f1b", ranks=2, micro_batches=2)
    with pytest.raises(PartitionError, match="have 4 and 5 layers"):
        Moves.between(Partition((0, 2, 4)), Partition((0, 2, 5)), schedule)
    for old, new in itertools.permutations([Partition((0, 4)), Partition((0, 2, 4))]):
        with pytest.raises(PartitionError, match="has 1 parts, schedule '1f1b' 2"):
            Moves.between(old, new, schedule)

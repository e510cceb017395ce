"""Messages through shared memory, the rings they lie in, and sums up a tree of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import (
    MessageMismatch,
)
from pipeline.links.protocol import LANE_B, LANE_F
from pipeline.links.ring import Ring
from pipeline.links.shared_link import is_possible
from pipeline.links.tree import parent_and_children, sum_over_ranks
from tests.pipeline.processes import run_processes
from tests.pipeline.transports import LINK, connected_mesh

Run = Callable[..., list[Any]]


# -- through shared memory -----------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 700), max_size=60), st.randoms(use_true_random=False))
def test_a_ring_gives_out_places_that_do_not_meet(sizes: list[int], random: Any) -> None:
    ring, held, taken = Ring(1024), [], 0
    for size in sizes:
        while held and random.random() < 0.4:
            held.pop(0)
            taken += 1
        start = ring.place(size, taken)
        if start < 0:
            assert held, "an empty ring has room for whatever is not larger than itself"
            continue
        assert 0 <= start <= 1024 - size
        assert all(start + size <= other or other + length <= start for other, length in held)
        held.append((start, size))


def test_a_ring_takes_back_and_starts_again_when_it_is_empty() -> None:
    ring = Ring(256)
    assert [ring.place(64, 0), ring.place(100, 0), ring.place(100, 0)] == [0, 64, -1]
    ring.take_back()
    assert [ring.place(192, 0), ring.place(1, 0)] == [64, -1]
    assert [ring.place(64, 1), ring.place(64, 1)] == [0, -1]
    assert ring.place(256, 3) == 0


def _flood(count: int, size: int) -> int:
    """Rank 0 sends more than the memory between the ranks holds; rank 1 posts for it later, and in between sends."""
    mesh = connected_mesh()
    total = 0
    if mesh.rank == 0:
        pending = [mesh.link.send(1, torch.full((size,), float(n)), LANE_F) for n in range(count)]
        answer = torch.zeros(1)
        mesh.link.receive(1, answer, LANE_B).wait()
        for transfer in pending:
            transfer.wait()
        return int(answer)
    mesh.link.send(0, torch.tensor([7.0]), LANE_B).wait()
    for n in range(count):
        buffer = torch.zeros(size)
        mesh.link.receive(0, buffer, LANE_F).wait()
        total += int((buffer == n).sum())
    return total


@pytest.mark.parametrize(("count", "size"), [(20, 200_000), (6000, 1), (40, 300_000)])
def test_more_messages_than_fit_arrive_in_order(run: Run, count: int, size: int) -> None:
    assert run(_flood, 2, count, size) == [7, count * size]


def _unlike() -> str:
    mesh = connected_mesh()
    if mesh.rank == 0:
        mesh.link.send(1, torch.zeros(3), LANE_F).wait()
        return ""
    with pytest.raises(MessageMismatch) as caught:
        mesh.link.receive(0, torch.zeros(4), LANE_F).wait()
    return str(caught.value)


@pytest.mark.skipif(not is_possible(), reason="no link through shared memory on this kind of machine")
def test_a_message_of_another_size_is_told_by_its_bytes() -> None:
    assert run_processes(_unlike, 2, environment={LINK: "shm"})[1] == (
        "rank 1 had posted 16 bytes for the next message to receive from rank 0 on lane F, which has 12"
    )


# -- a sum over all ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 7, 8])
def test_the_tree_has_each_rank_once_and_is_as_deep_as_the_number_of_its_bits(ranks: int) -> None:
    depth = {0: 0}
    for rank in range(ranks):
        parent, children = parent_and_children(rank, ranks)
        assert all(parent_and_children(child, ranks)[0] == rank for child in children)
        if parent is not None:
            depth[rank] = depth[parent] + 1
    assert sorted(depth) == list(range(ranks))
    assert max(depth.values()) <= (ranks - 1).bit_length()


def _sum() -> list[float]:
    mesh = connected_mesh()
    vector = torch.tensor([1.0, float(mesh.rank)], dtype=torch.float64)
    for _ in range(2):
        sum_over_ranks(mesh.link, vector)
    return vector.tolist()


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_sum_over_all_ranks(run: Run, ranks: int) -> None:
    assert run(_sum, ranks) == [[ranks**2, ranks * sum(range(ranks))]] * ranks

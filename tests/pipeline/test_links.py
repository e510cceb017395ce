"""Messages and collectives, each case on threads of one process and on real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipeline.errors import (
    ConfigError,
    LinkError,
    MessageMismatch,
    RankDied,
    TransferDeadlock,
    TransferTimeout,
)
from pipeline.links.distributed_link import PairLink
from pipeline.links.local import run_local
from pipeline.links.protocol import LANE_B, LANE_CONTROL, LANE_F
from pipeline.links.ring import Ring
from pipeline.links.shared_link import is_possible
from pipeline.links.tree import parent_and_children, sum_over_ranks
from pipeline.mesh import Mesh, make_mesh
from tests.pipeline.processes import run_processes, try_processes

Run = Callable[..., list[Any]]


@pytest.fixture(params=["threads", "processes", "processes that share memory"])
def run(request: pytest.FixtureRequest) -> Run:
    if request.param == "threads":
        return run_local
    link = "shm" if "share" in request.param else "gloo"
    if link == "shm" and not is_possible():
        pytest.skip("no link through shared memory on this kind of machine")
    return partial(run_processes, environment={"TEST_LINK": link})


def _mesh() -> Mesh:
    """The mesh of a test's rank, with every pair connected."""
    mesh = make_mesh(device="cpu", link=os.environ.get("TEST_LINK", "auto"))
    mesh.link.connect([(a, b) for a in range(mesh.size) for b in range(mesh.size) if a != b])
    return mesh


# -- messages ------------------------------------------------------------------------------------------------


def _ring() -> list[float]:
    mesh = _mesh()
    following, previous = (mesh.rank + 1) % mesh.size, (mesh.rank - 1) % mesh.size
    buffer = torch.empty(2, 2)
    receiving = mesh.link.receive(previous, buffer, LANE_F)
    mesh.link.send(following, torch.full((2, 2), float(mesh.rank)), LANE_F).wait()
    receiving.wait()
    receiving.wait()  # again: nothing happens
    return buffer.flatten().tolist()


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_message_fills_the_posted_buffer(run: Run, ranks: int) -> None:
    assert run(_ring, ranks) == [[float((rank - 1) % ranks)] * 4 for rank in range(ranks)]


def _many(count: int) -> tuple[list[int], list[int]]:
    """Rank 0 sends on lanes F and B alternately; rank 1 takes all of B before it takes F from the end."""
    mesh = _mesh()
    lanes = (LANE_F, LANE_B)
    if mesh.rank == 0:
        sent = [torch.tensor([n]) for n in range(2 * count)]
        pending = [mesh.link.send(1, tensor, lanes[n % 2]) for n, tensor in enumerate(sent)]
        for transfer in pending:
            transfer.wait()
        return [], []
    buffers = {lane: [torch.zeros(1, dtype=torch.int64) for _ in range(count)] for lane in lanes}
    waits = {lane: [mesh.link.receive(0, b, lane) for b in buffers[lane]] for lane in reversed(lanes)}
    for transfer in (*waits[LANE_B], *reversed(waits[LANE_F])):
        transfer.wait()
    return tuple([int(b) for b in buffers[lane]] for lane in lanes)  # type: ignore[return-value]


def test_each_lane_is_in_order_and_waits_may_come_in_any(run: Run) -> None:
    evens, odds = run(_many, 2, 100)[1]
    assert evens == list(range(0, 200, 2))
    assert odds == list(range(1, 200, 2))


def _unposted() -> list[int]:
    """A message that nobody has posted for keeps no other lane, direction or peer from going on."""
    mesh = _mesh()
    link = mesh.link
    got = torch.zeros(1, dtype=torch.int64)
    if mesh.rank == 0:
        late = link.send(1, torch.tensor([7]), LANE_CONTROL)
        link.send(1, torch.tensor([1]), LANE_F).wait()
        link.send(2, torch.tensor([2]), LANE_F).wait()
        link.receive(1, got, LANE_B).wait()
        late.wait()
    elif mesh.rank == 1:
        link.receive(0, got, LANE_F).wait()
        link.send(0, got + 10, LANE_B).wait()
        header = torch.zeros(1, dtype=torch.int64)
        link.receive(0, header, LANE_CONTROL).wait()
        return [int(got), int(header)]
    else:
        link.receive(0, got, LANE_F).wait()
    return [int(got)]


def test_a_message_that_waits_holds_up_nothing_else(run: Run) -> None:
    assert run(_unposted, 3) == [[11], [1, 7], [2]]


_MESSAGES = [
    torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    torch.tensor([1 + 2j, 3 - 4j]),
    torch.tensor([True, False, True]),
    torch.tensor(3.25, dtype=torch.float64),
    torch.empty(0, 3),
    torch.arange(6, dtype=torch.int32).view(2, 3),
    torch.arange(300_000, dtype=torch.float32),
]


def _types() -> list[bool]:
    mesh = _mesh()
    equal = []
    for message in _MESSAGES:
        if mesh.rank == 0:
            mesh.link.send(1, message, LANE_F).wait()
        else:
            buffer = torch.empty_like(message)
            mesh.link.receive(0, buffer, LANE_F).wait()
            equal.append(torch.equal(buffer, message))
    return equal


def test_any_type_and_shape_of_tensor_arrives(run: Run) -> None:
    assert run(_types, 2)[1] == [True] * len(_MESSAGES)


def _reuse() -> list[list[float]]:
    """The sender changes its tensor after the wait, and sends with a graph attached; the receiver's is its own."""
    mesh = _mesh()
    if mesh.rank == 0:
        tensor = torch.zeros(2, requires_grad=True) * 2
        for value in (1.0, 2.0):
            with torch.no_grad():
                tensor.fill_(value)
            mesh.link.send(1, tensor, LANE_F).wait()
        return []
    buffers = [torch.zeros(2), torch.zeros(2)]
    for buffer in buffers:
        mesh.link.receive(0, buffer, LANE_F).wait()
    return [b.tolist() for b in buffers if not b.requires_grad]


def test_a_sent_tensor_may_be_reused_after_the_wait(run: Run) -> None:
    assert run(_reuse, 2)[1] == [[1.0, 1.0], [2.0, 2.0]]


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2)), max_size=30), st.randoms(use_true_random=False))
def test_any_posting_order_delivers_in_order(messages: list[tuple[int, int]], random: Any) -> None:
    """Messages as (source, lane); each side posts its sends and receives in an order of its own across lanes."""

    def worker() -> list[tuple[int, int, int]]:
        link = make_mesh(device="cpu").link
        mine = [m for m in dict.fromkeys(messages) for _ in range(messages.count(m))]
        order = mine if link.rank == 0 else shuffled
        posted, got = [], []
        for number, (source, lane) in enumerate(order):
            if source == link.rank:
                posted.append(link.send(1 - source, torch.tensor([order[:number].count((source, lane))]), lane))
            else:
                got.append((source, lane, torch.zeros(1, dtype=torch.int64)))
                posted.append(link.receive(source, got[-1][2], lane))
        for pending in posted:
            pending.wait()
        return [(source, lane, int(value)) for source, lane, value in got]

    shuffled = list(messages)
    random.shuffle(shuffled)
    for rank, received in enumerate(run_local(worker, 2)):
        for channel in {m for m in messages if m[0] != rank}:
            numbers = [n for source, lane, n in received if (source, lane) == channel]
            assert numbers == list(range(messages.count(channel)))


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
    mesh = _mesh()
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
    mesh = _mesh()
    if mesh.rank == 0:
        mesh.link.send(1, torch.zeros(3), LANE_F).wait()
        return ""
    with pytest.raises(MessageMismatch) as caught:
        mesh.link.receive(0, torch.zeros(4), LANE_F).wait()
    return str(caught.value)


@pytest.mark.skipif(not is_possible(), reason="no link through shared memory on this kind of machine")
def test_a_message_of_another_size_is_told_by_its_bytes() -> None:
    assert run_processes(_unlike, 2, environment={"TEST_LINK": "shm"})[1] == (
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
    mesh = _mesh()
    vector = torch.tensor([1.0, float(mesh.rank)], dtype=torch.float64)
    for _ in range(2):
        sum_over_ranks(mesh.link, vector)
    return vector.tolist()


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_sum_over_all_ranks(run: Run, ranks: int) -> None:
    assert run(_sum, ranks) == [[ranks**2, ranks * sum(range(ranks))]] * ranks


# -- what is refused -----------------------------------------------------------------------------------------


def _to(peer: int) -> str:
    link = _mesh().link
    try:
        link.send(peer, torch.zeros(1), LANE_F)
    except LinkError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("peer", [0, 2, -1])
def test_the_peer_must_be_another_rank(run: Run, peer: int) -> None:
    assert run(_to, 2, peer)[0] == (
        f"rank 0 of 2 cannot exchange a message with rank {peer}: the peer must be another rank of the world"
    )


def test_a_world_of_one_has_nobody_to_send_to() -> None:
    with pytest.raises(LinkError, match="rank 0 of 1 cannot exchange a message with rank 0"):
        make_mesh(device="cpu").link.send(0, torch.zeros(1), LANE_F)


def _mismatched(sent: Tensor, posted: Tensor, caught: list[str]) -> None:
    link = _mesh().link
    pending = link.send(1, sent, LANE_F) if link.rank == 0 else link.receive(0, posted, LANE_F)
    try:
        pending.wait()
    except MessageMismatch as error:
        caught.append(str(error))


@pytest.mark.parametrize(
    ("posted", "form"),
    [
        (torch.zeros(3), "3 elements of torch.float32 in shape (3,)"),
        (torch.zeros(4), "4 elements of torch.float32 in shape (4,)"),
        (torch.zeros(2, dtype=torch.float64), "2 elements of torch.float64 in shape (2,)"),
    ],
)
def test_a_message_of_another_form_is_an_error_on_both_sides(posted: Tensor, form: str) -> None:
    caught: list[str] = []
    run_local(_mismatched, 2, torch.zeros(1, 2), posted, caught)
    text = "on lane F rank 0 sent 2 elements of torch.float32 in shape (1, 2), but rank 1 had posted "
    assert caught == [text + form] * 2


def test_the_same_elements_in_another_shape_are_no_mismatch() -> None:
    posted = torch.zeros(3, 2)
    run_local(_mismatched, 2, torch.arange(6.0), posted, [])
    assert posted.tolist() == [[0, 1], [2, 3], [4, 5]]


def _strided() -> None:
    link = _mesh().link
    if link.rank == 0:
        link.send(1, torch.zeros(4, 4).t()[:2], LANE_F).wait()
    else:
        link.receive(0, torch.zeros(8), LANE_F).wait()


def test_a_tensor_that_is_not_contiguous_is_refused(run: Run) -> None:
    with pytest.raises((LinkError, AssertionError), match="contiguous"):
        run(_strided, 2)


# -- collectives ---------------------------------------------------------------------------------------------


def _collectives() -> dict[str, Any]:
    mesh = _mesh()
    world, rank, size = mesh.world, mesh.rank, mesh.size
    results: dict[str, Any] = {"ranks": world.ranks, "rank": world.rank}
    tensor = torch.tensor([1.0, float(rank)])
    world.all_reduce(tensor)
    results["all_reduce"] = tensor.tolist()
    started = [torch.full((3,), 10**n, dtype=torch.int64) for n in range(3)]
    for pending in [world.all_reduce(t, async_op=True) for t in started]:
        pending.wait(20.0)
    results["all_reduce, three at once"] = [int(t[0]) for t in started]
    part = torch.zeros(2)
    world.reduce_scatter(part, torch.arange(2.0 * size) + rank)
    results["reduce_scatter"] = part.tolist()
    whole = torch.zeros(2 * size)
    world.all_gather_into(whole, torch.tensor([rank, -rank], dtype=torch.float32), async_op=True).wait()
    results["all_gather_into"] = whole.tolist()
    copied = torch.tensor([rank])
    world.broadcast(copied, source=size - 1)
    results["broadcast"] = int(copied)
    results["all_gather"] = [t.tolist() for t in world.all_gather(torch.tensor([[rank, 5]]))]
    results["all_gather_object"] = world.all_gather_object({"rank": rank})
    results["broadcast_object"] = world.broadcast_object(("from", rank), source=1)
    world.barrier()
    return results


@pytest.mark.parametrize("ranks", [2, 3])
def test_collectives(run: Run, ranks: int) -> None:
    total = sum(range(ranks))
    for rank, results in enumerate(run(_collectives, ranks)):
        assert results == {
            "ranks": tuple(range(ranks)),
            "rank": rank,
            "all_reduce": [ranks, total],
            "all_reduce, three at once": [ranks, 10 * ranks, 100 * ranks],
            "reduce_scatter": [2 * rank * ranks + total, (2 * rank + 1) * ranks + total],
            "all_gather_into": [value for r in range(ranks) for value in (r, -r)],
            "broadcast": ranks - 1,
            "all_gather": [[[r, 5]] for r in range(ranks)],
            "all_gather_object": [{"rank": r} for r in range(ranks)],
            "broadcast_object": ("from", 1),
        }


def test_collectives_of_one_rank_leave_everything_as_it_is() -> None:
    world = make_mesh(device="cpu").world
    tensor, part, whole = torch.tensor([3.0]), torch.zeros(2), torch.zeros(2)
    world.all_reduce(tensor, async_op=True).wait()
    world.reduce_scatter(part, torch.tensor([1.0, 2.0]))
    world.all_gather_into(whole, part)
    world.broadcast(tensor, source=0)
    world.barrier()
    assert (tensor.tolist(), part.tolist(), whole.tolist()) == ([3.0], [1.0, 2.0], [1.0, 2.0])
    assert [t.tolist() for t in world.all_gather(tensor)] == [[3.0]]
    assert (world.all_gather_object("a"), world.broadcast_object("b", 0)) == (["a"], "b")


def test_threads_add_in_rank_order() -> None:
    values = [1e8, 1.0, -1e8, 3.0]  # in float32 the sum depends on the order

    def worker() -> tuple[float, float]:
        mesh = make_mesh(device="cpu")
        time.sleep(0.002 * ((mesh.rank * 3) % 4))  # the ranks come in another order
        tensor, part = torch.tensor([values[mesh.rank]]), torch.zeros(1)
        mesh.world.all_reduce(tensor)
        mesh.world.reduce_scatter(part, torch.full((4,), values[mesh.rank]))
        return tensor.item(), part.item()

    a, b, c, d = (torch.tensor(value) for value in values)
    expected = (((a + b) + c) + d).item()
    assert run_local(worker, 4) == [(expected, expected)] * 4


class _HeldUp:
    """A lock after which the first to have held it goes on only when the second has, too."""

    def __init__(self) -> None:
        self._lock, self._leavers, self._both = threading.Lock(), 0, threading.Event()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._leavers += 1
        second = self._leavers == 2
        self._lock.release()
        if second:
            self._both.set()
        self._both.wait(5.0)


def test_threads_add_once_however_close_they_come() -> None:
    def worker() -> float:
        mesh = make_mesh()
        mesh.world.barrier()
        mesh.world._meeting.lock = _HeldUp()
        mesh.link.send(1 - mesh.rank, torch.zeros(1), LANE_F)
        mesh.link.receive(1 - mesh.rank, torch.zeros(1), LANE_F).wait()  # both have set it, one is in use
        tensor = torch.tensor([1.0])
        mesh.world.all_reduce(tensor)
        return tensor.item()

    assert run_local(worker, 2) == [2.0, 2.0]


def test_ranks_in_different_collectives_are_told_so() -> None:
    def worker() -> str:
        mesh = make_mesh(device="cpu")
        if mesh.rank == 1:
            time.sleep(0.05)
        with pytest.raises(MessageMismatch) as caught:
            mesh.world.all_reduce(torch.zeros(2 + mesh.rank))
        return str(caught.value)

    text = "rank 0 is in all_reduce of 2 float32, but rank 1 of the same group in all_reduce of 3 float32"
    assert run_local(worker, 2) == [text] * 2


def test_parts_that_do_not_make_the_whole_are_refused() -> None:
    def worker() -> None:
        make_mesh(device="cpu").world.reduce_scatter(torch.zeros(2), torch.zeros(5))

    with pytest.raises(LinkError, match=r"reduce_scatter over 2 ranks takes .* the part is 2 float32, the whole 5"):
        run_local(worker, 2)


# -- time-outs, failures, death ------------------------------------------------------------------------------


def _patient() -> tuple[tuple[int, int | None, int | None], bool, str, str]:
    link = _mesh().link
    if link.rank == 1:
        time.sleep(1.0)
        return (1, None, None), True, "", ""
    pending = link.receive(1, torch.zeros(1), LANE_B)
    started = time.monotonic()
    with pytest.raises(TransferTimeout) as first:
        pending.wait(0.2)
    soon = time.monotonic() - started < 0.9
    with pytest.raises(LinkError) as second:
        link.receive(1, torch.zeros(1), LANE_B).wait()
    return (first.value.rank, first.value.peer, first.value.lane), soon, str(first.value), str(second.value)


def test_a_wait_that_times_out_is_final(run: Run) -> None:
    where, soon, first, second = run(_patient, 2)[0]
    assert where == (0, 1, LANE_B)
    assert soon
    assert first == (
        "rank 0 waited 0.2 s to receive from rank 1 on lane B; "
        "if that is how long a step may take, raise timeout above 0.2"
    )
    assert second == (
        "rank 0 waited to receive from rank 1 on lane B, but can exchange nothing since it gave up an earlier wait"
    )


def _one_sleeps() -> None:
    mesh = make_mesh(device="cpu", timeout=0.5)
    if mesh.rank == 1:
        time.sleep(1.5)
    mesh.world.barrier()


def test_a_collective_times_out_by_the_setting() -> None:
    with pytest.raises(TransferTimeout, match=r"^rank 0 waited 0.5 s in barrier over ranks \(0, 1\) for 1; if"):
        run_local(_one_sleeps, 2, timeout=0.5)
    outcomes = try_processes(_one_sleeps, 2)
    assert "TransferTimeout: rank 0 waited 0.5 s in all_reduce over ranks (0, 1); if" in str(outcomes[0].error)
    assert [outcome.exit_code for outcome in outcomes] == [1, 1]


def _one_raises(where: str) -> None:
    mesh = _mesh()
    if mesh.rank == 1:
        time.sleep(0.1)
        raise ValueError("the layer's own words")
    if where == "barrier":
        mesh.world.barrier()
    elif where == "send":
        mesh.link.send(1, torch.zeros(1_000_000), LANE_F).wait()
    else:
        mesh.link.receive(1, torch.zeros(1), LANE_F).wait()


@pytest.mark.parametrize("where", ["barrier", "send", "receive"])
def test_the_first_exception_stops_all_threads_and_is_raised(where: str) -> None:
    started = time.monotonic()
    with pytest.raises(ValueError, match="the layer's own words") as caught:
        run_local(_one_raises, 3, where)
    assert time.monotonic() - started < 5.0
    assert caught.value.__notes__ == ["raised on rank 1 of 3 in run_local"]
    assert [entry.name for entry in caught.traceback][-1] == "_one_raises"


@pytest.mark.parametrize("where", ["barrier", "send", "receive"])
def test_processes_notice_that_one_has_ended(where: str) -> None:
    outcomes = try_processes(_one_raises, 3, where)
    assert [outcome.exit_code for outcome in outcomes] == [1, 1, 1]
    assert max(outcome.seconds for outcome in outcomes) < 10
    assert "ValueError: the layer's own words" in str(outcomes[1].error)
    for rank in (0, 2):
        assert f"RankDied: rank {rank} waited" in str(outcomes[rank].error)


def _one_dies() -> tuple[int, int | None, int | None, str]:
    mesh = _mesh()
    mesh.world.barrier()
    if mesh.rank == 1:
        os._exit(7)
    with pytest.raises(RankDied) as caught:
        mesh.link.receive(1, torch.zeros(1), LANE_F).wait()
    return caught.value.rank, caught.value.peer, caught.value.lane, str(caught.value)


def test_a_rank_that_dies_is_noticed_by_its_peer() -> None:
    survivor, dead = try_processes(_one_dies, 2)
    assert (survivor.exit_code, dead.exit_code) == (0, 7)
    assert survivor.seconds < 10
    assert survivor.result[:3] == (0, 1, LANE_F)
    assert survivor.result[3] == (
        "rank 0 waited to receive from rank 1 on lane F, but rank 1 is gone: "
        "it has ended or given up, and its own output says why"
    )


def test_threads_that_all_wait_are_told_at_once() -> None:
    def worker() -> None:
        link = make_mesh(device="cpu").link
        if link.rank < 2:
            link.receive(1 - link.rank, torch.zeros(1), LANE_F).wait()

    started = time.monotonic()
    with pytest.raises(TransferDeadlock) as caught:
        run_local(worker, 3)
    assert time.monotonic() - started < 5.0
    assert str(caught.value) == (
        "no rank can go on: rank 0 waits to receive from rank 1 on lane F; "
        "rank 1 waits to receive from rank 0 on lane F; rank 2 has returned"
    )


def test_a_thread_of_the_users_own_is_not_mistaken_for_its_rank() -> None:
    def worker() -> int:
        link = make_mesh(device="cpu").link
        buffer = torch.zeros(1, dtype=torch.int64)
        if link.rank == 1:
            helper = threading.Thread(target=lambda: link.receive(0, buffer, LANE_F).wait())
            helper.start()
            time.sleep(0.05)
            helper.join()
        else:
            time.sleep(0.1)
            link.send(1, torch.tensor([4]), LANE_F).wait()
        return int(buffer)

    assert run_local(worker, 2) == [0, 4]


def test_run_local_refuses_what_makes_no_sense() -> None:
    def worker() -> None:
        run_local(lambda: None, 2)

    with pytest.raises(ConfigError, match="run_local was called by one of its own workers"):
        run_local(worker, 2)
    with pytest.raises(ConfigError, match="run_local runs 1 rank or more, not 0"):
        run_local(lambda: None, 0)
    assert run_local(lambda: make_mesh(device="cpu").size, 1) == [1]


def test_what_a_worker_exits_with_is_raised() -> None:
    def worker() -> None:
        mesh = make_mesh(device="cpu")
        if mesh.rank == 0:
            sys.exit(3)
        mesh.world.barrier()

    with pytest.raises(SystemExit) as caught:
        run_local(worker, 2)
    assert caught.value.code == 3


# -- leaving -------------------------------------------------------------------------------------------------

_SCRIPT = """
import sys, time, torch
from pipeline.mesh import make_mesh
mesh = make_mesh(device="cpu", timeout=60)
mesh.world.barrier()
print(time.time(), flush=True)
if mesh.rank == 0 and sys.argv[1] == "raise":
    held = mesh.link.receive(1, torch.zeros(1), 0), mesh.world.all_reduce(torch.zeros(1), async_op=True)
    raise ValueError("first")
if sys.argv[1] == "raise":
    mesh.link.receive(0, torch.zeros(1), 0).wait()
"""


@pytest.mark.parametrize("how", ["return", "raise"])
def test_a_script_ends_cleanly_and_at_once(tmp_path: Path, how: str) -> None:
    """As under torchrun.  A started collective that nobody joins would keep a process for its time-out."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    command = [sys.executable, str(script), how]
    pipe = subprocess.PIPE
    ranks = [
        subprocess.Popen(command, env={**environment, "RANK": str(rank)}, stdout=pipe, stderr=pipe, text=True)
        for rank in range(2)
    ]
    try:
        texts = [rank.communicate(timeout=90) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert time.time() - float(texts[0][0]) < 20  # since both were ready
    assert not any("terminate" in errors for _, errors in texts)
    if how == "return":
        assert [(rank.returncode, errors) for rank, (_, errors) in zip(ranks, texts, strict=True)] == [(0, "")] * 2
    else:
        assert [rank.returncode for rank in ranks] == [1, 1]
        assert "ValueError: first" in texts[0][1]
        assert "RankDied: rank 1 waited to receive from rank 0 on lane F, but rank 0 is gone" in texts[1][1]


# -- one connection for each direction -----------------------------------------------------------------------


def _pairs() -> tuple[list[float], str]:
    """What is used on accelerators, over connections of the host: no tags, one order for each direction."""
    mesh: Mesh = make_mesh(device="cpu")
    link = PairLink(mesh.link, mesh.device)  # type: ignore[arg-type]
    link.connect([(0, 1), (1, 0), (1, 2), (0, 1)])
    link.connect([(1, 2), (2, 1)])
    got = [torch.zeros(1) for _ in range(4)]
    if mesh.rank == 0:
        waits = [link.queue_send(1, torch.tensor([float(n)])) for n in range(3)]
        waits.append(link.queue_receive(1, got[0]))
    elif mesh.rank == 1:
        waits = [link.queue_receive(0, buffer) for buffer in got[:3]]
        waits += [link.queue_send(0, torch.tensor([5.0])), link.queue_send(2, torch.tensor([6.0]))]
    else:
        waits = [link.queue_receive(1, got[0])]
    for pending in waits:
        pending.wait()
    refused = ""
    try:
        link.queue_send(2 - mesh.rank, torch.zeros(1))
    except LinkError as error:
        refused = str(error)
    return [float(value) for value in got], refused


def test_pairs_of_ranks_connected_by_direction() -> None:
    results = run_processes(_pairs, 3)
    assert [values for values, _ in results] == [[5, 0, 0, 0], [0, 1, 2, 0], [6, 0, 0, 0]]
    assert results[0][1].startswith("there is no connection from rank 0 to rank 2: connect was called for [(0, 1),")

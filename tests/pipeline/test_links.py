"""Messages and collectives, each case on threads of one process and on real processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipeline.errors import (
    LinkError,
    MessageMismatch,
)
from pipeline.links.distributed_link import PairLink
from pipeline.links.local import run_local
from pipeline.links.protocol import LANE_B, LANE_CONTROL, LANE_F
from pipeline.mesh import Mesh, make_mesh
from tests.pipeline.processes import run_processes
from tests.pipeline.transports import connected_mesh

Run = Callable[..., list[Any]]


# -- messages ------------------------------------------------------------------------------------------------


def _ring() -> list[float]:
    mesh = connected_mesh()
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
    mesh = connected_mesh()
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
    mesh = connected_mesh()
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
    mesh = connected_mesh()
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
    mesh = connected_mesh()
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


# -- what is refused -----------------------------------------------------------------------------------------


def _to(peer: int) -> str:
    link = connected_mesh().link
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
    link = connected_mesh().link
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
    link = connected_mesh().link
    if link.rank == 0:
        link.send(1, torch.zeros(4, 4).t()[:2], LANE_F).wait()
    else:
        link.receive(0, torch.zeros(8), LANE_F).wait()


def test_a_tensor_that_is_not_contiguous_is_refused(run: Run) -> None:
    with pytest.raises((LinkError, AssertionError), match="contiguous"):
        run(_strided, 2)


# -- collectives ---------------------------------------------------------------------------------------------


def _collectives() -> dict[str, Any]:
    mesh = connected_mesh()
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

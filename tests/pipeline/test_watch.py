"""The board on which ranks write what they do, and the report that is read from it."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from pipeline.links.relay import Relay, relay_between_hosts
from pipeline.mesh import make_mesh
from pipeline.watch import BYTES_PER_RANK, At, Board, hang_report
from schedules import Action, Instruction, Op, build, lower
from tests.pipeline.processes import run_processes

ROWS = lower(build("1f1b", ranks=3, micro_batches=4)).rows


class Ranks:
    """Boards of several ranks over one memory and one clock that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int = 3) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.memory = bytearray(BYTES_PER_RANK * ranks)
        self.boards = [Board(self.memory, rank) for rank in range(ranks)]

    def begin(self, step: int) -> None:
        for board in self.boards:
            board.begin(step)

    def at(self, rank: int, place: str | int) -> None:
        row = [str(instruction) for instruction in ROWS[rank % len(ROWS)]]
        self.boards[rank].at(row.index(place) if isinstance(place, str) else place)

    def report(self) -> list[str]:
        return hang_report(self.boards[0], ROWS).splitlines()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


def test_ranks_read_what_the_others_wrote(ranks: Ranks) -> None:
    ranks.boards[1].begin(7)
    ranks.boards[1].at(12)
    ranks.now += 2.5
    code, seconds, step, failed, process = ranks.boards[0].state(1)
    assert (code, seconds, step, failed) == (12, 2.5, 7, False)
    assert process > 0
    assert ranks.boards[0].state(2)[:4] == (At.OUTSIDE, 2.5, -1, False)


def test_a_failure_counts_for_one_step(ranks: Ranks) -> None:
    ranks.begin(3)
    ranks.boards[2].fail(3)
    reader = ranks.boards[0]
    assert [reader.failed(rank, 3) for rank in range(3)] == [False, False, True]
    assert not reader.failed(2, 4)
    ranks.boards[2].begin(3)  # of another engine, which counts for itself
    assert not reader.failed(2, 3)


def test_writing_costs_next_to_nothing() -> None:
    board = Board.alone()
    started = time.perf_counter()
    for code in range(20_000):
        board.at(code)
    assert (time.perf_counter() - started) / 20_000 < 20e-6  # 0.2 µs on an idle machine


def test_a_rank_that_computes_holds_up_those_behind_it(ranks: Ranks) -> None:
    ranks.begin(0)
    ranks.at(2, "2F0")
    ranks.now += 1.0
    ranks.at(0, "0B0")
    ranks.at(1, "1B0")
    ranks.now += 60.0
    assert ranks.report() == [
        "rank 0 waits in RECV_B 0B0 for rank 1, which waits too",
        "rank 1 waits in RECV_B 1B0 for rank 2, which is in 2F0 since 61 s",
        "rank 2 is in 2F0 since 61 s",
        "rank 2 holds up ranks 0, 1",
    ]


def test_a_message_that_was_sent_is_waited_for_by_nobody(ranks: Ranks) -> None:
    ranks.begin(0)
    ranks.at(0, "0F1")
    ranks.at(1, "1F0")  # what it needs has left rank 0, so it computes
    ranks.at(2, "2F0")
    assert ranks.report() == [
        "rank 0 is in 0F1 since 0.0 s",
        "rank 1 is in 1F0 since 0.0 s",
        "rank 2 waits in RECV_F 2F0 for rank 1, which is in 1F0 since 0.0 s",
        "rank 1 holds up rank 2",
    ]


def test_a_send_waits_for_the_rank_that_takes_it_in(ranks: Ranks) -> None:
    ranks.begin(0)
    ranks.at(0, "0B1")
    ranks.at(1, "1F1")
    ranks.at(2, "WAIT_SEND 2B0")
    ranks.boards[1].fail(0)
    assert ranks.report()[1:3] == [
        "rank 1 is in 1F1, after it failed, since 0.0 s",
        "rank 2 waits in WAIT_SEND 2B0 for rank 1, which is in 1F1, after it failed, since 0.0 s",
    ]


def test_agreements_wait_for_all_that_have_not_come(ranks: Ranks) -> None:
    ranks.begin(0)
    ranks.at(0, At.CLOSING)
    ranks.at(1, "1B3")
    ranks.at(2, At.CLOSING)
    ranks.now += 12.3
    assert ranks.report() == [
        "rank 0 waits in the agreement that closes the step for rank 1, which is in 1B3 since 12 s",
        "rank 1 is in 1B3 since 12 s",
        "rank 2 waits in the agreement that closes the step for rank 1, which is in 1B3 since 12 s",
        "rank 1 holds up ranks 0, 2",
    ]
    ranks.at(1, At.CLOSING)
    ranks.at(2, At.OUTSIDE)
    ranks.boards[0].begin(1)
    assert ranks.report()[0] == "rank 0 waits in the agreement that opens the step for ranks 1, 2"


def test_a_rank_that_has_left_sends_nothing_any_more(ranks: Ranks) -> None:
    ranks.begin(0)
    ranks.at(0, At.LEFT)
    ranks.at(1, "1F0")
    assert ranks.report()[1] == "rank 1 waits in RECV_F 1F0 for rank 0, which has left since 0.0 s"


def test_a_cycle_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank takes in the other's message before it sends its own; no checked program does."""
    rows = [
        [
            Instruction(Op.RECV_F, Action.parse(f"{rank}F0"), peer=1 - rank),
            Instruction(Op.F, Action.parse(f"{rank}F0")),
            Instruction(Op.SEND_F, Action.parse(f"{rank}F0"), peer=1 - rank),
        ]
        for rank in range(2)
    ]
    ranks = Ranks(monkeypatch, ranks=2)
    ranks.begin(0)
    for board in ranks.boards:
        board.at(1)
    assert hang_report(ranks.boards[1], rows).splitlines() == [
        "rank 0 waits in RECV_F 0F0 for rank 1, which waits too",
        "rank 1 waits in RECV_F 1F0 for rank 0, which waits too",
        "a cycle: rank 0 waits for rank 1 waits for rank 0",
    ]


def test_further_pipelines_of_the_same_program(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, ranks=6)
    ranks.begin(0)
    ranks.at(4, "1F0")
    ranks.at(3, "0F0")
    assert ranks.report()[4] == "rank 4 waits in RECV_F 1F0 for rank 3, which is in 0F0 since 0.0 s"


def test_ranks_that_never_wrote_are_not_accused(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch)
    alone = Board(bytearray(BYTES_PER_RANK * 3), 1)
    alone.begin(0)
    alone.at([str(i) for i in ROWS[1]].index("1F0"))
    ranks.boards = [alone]
    assert ranks.report() == [
        "rank 0 has not told what it does",
        "rank 1 is in 1F0 since 0.0 s",
        "rank 2 has not told what it does",
    ]


def test_a_process_that_is_gone_is_called_dead(ranks: Ranks) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    monkey = pytest.MonkeyPatch()
    monkey.setattr("os.getpid", lambda: ended.pid)
    ranks.boards[0] = Board(ranks.memory, 0)
    monkey.undo()
    ranks.begin(0)
    ranks.at(0, "0F0")
    ranks.at(1, "1F0")
    assert ranks.report()[0] == "rank 0 has died; it last told that it is in 0F0"
    assert ranks.report()[1] == (
        "rank 1 waits in RECV_F 1F0 for rank 0, which has died; it last told that it is in 0F0"
    )


def test_a_process_whose_end_nobody_has_noticed_is_called_dead(ranks: Ranks) -> None:
    """As one that was killed, until its launcher looks after it."""
    ended = subprocess.Popen([sys.executable, "-c", "import os; os.close(1)"], stdout=subprocess.PIPE)
    ranks.boards[0]._words[ranks.boards[0]._base + 4] = ended.pid
    deadline = time.time() + 20
    while time.time() < deadline and ranks.report()[0].startswith("rank 0 is"):
        time.sleep(0.01)
    assert ranks.report()[0].startswith("rank 0 has died")
    ended.communicate()


@pytest.mark.parametrize("name", ["gpipe", "interleaved-1f1b"])
def test_every_place_of_a_program_can_be_reported(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    rows = lower(build(name, ranks=2, micro_batches=3)).rows
    ranks = Ranks(monkeypatch, ranks=2)
    ranks.begin(0)
    for index in range(max(map(len, rows))):
        for rank in range(2):
            ranks.boards[rank].at(min(index, len(rows[rank]) - 1))
        lines = hang_report(ranks.boards[0], rows).splitlines()
        assert [line[:6] for line in lines[:2]] == ["rank 0", "rank 1"]


# -- several hosts -------------------------------------------------------------------------------------------


def _two_hosts() -> list[tuple[int, int, bool, bool]]:
    """Ranks 0 and 1 on one host, rank 2 on another, as far as their boards tell."""
    mesh = make_mesh(device="cpu")
    hosts = [(0, 1), (2,)]
    board = mesh.board if mesh.rank < 2 else Board(bytearray(BYTES_PER_RANK * 3), 2)
    store = dist.distributed_c10d._get_default_store()
    relay = Relay(board, hosts, store, interval=0.02) if mesh.rank != 1 else None
    board.begin(4)
    board.at(10 + mesh.rank)
    if mesh.rank == 2:
        board.fail(4)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and [board.state(rank).code for rank in range(3)] != [10, 11, 12]:
        time.sleep(0.02)
    states = [board.state(rank) for rank in range(3)]
    mesh.world.barrier()
    if relay is not None:
        relay.stop()
    return [(state.code, state.step, board.failed(rank, 4), state.seconds < 60) for rank, state in enumerate(states)]


def test_boards_of_several_hosts_are_kept_alike() -> None:
    expected = [(10, 4, False, True), (11, 4, False, True), (12, 4, True, True)]
    assert run_processes(_two_hosts, 3) == [expected] * 3


def test_nothing_is_relayed_on_one_host() -> None:
    assert relay_between_hosts(Board.alone(0, 2), [(0, 1)], dist.HashStore()) is None

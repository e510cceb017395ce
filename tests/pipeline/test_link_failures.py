"""Waits that time out, ranks that fail or die, and how processes leave: what their peers see."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeline.errors import (
    ConfigError,
    LinkError,
    RankDied,
    TransferDeadlock,
    TransferTimeout,
)
from pipeline.links.local import run_local
from pipeline.links.protocol import LANE_B, LANE_F
from pipeline.mesh import make_mesh
from tests.pipeline.processes import try_processes
from tests.pipeline.transports import connected_mesh

Run = Callable[..., list[Any]]


# -- time-outs, failures, death ------------------------------------------------------------------------------


def _patient() -> tuple[tuple[int, int | None, int | None], bool, str, str]:
    link = connected_mesh().link
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
    mesh = connected_mesh()
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
    mesh = connected_mesh()
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

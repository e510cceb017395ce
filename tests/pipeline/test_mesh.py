"""The grid of ranks: coordinates, groups along both axes, and what does not fit."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeline import device as devices
from pipeline.errors import ConfigError, LinkError, WorldSizeError
from pipeline.links.distributed import device_mesh
from pipeline.links.local import run_local
from pipeline.links.protocol import LANE_F, own_part
from pipeline.mesh import make_mesh
from pipeline.watch import At
from tests.pipeline.processes import run_processes

Run = Callable[..., list[Any]]


@pytest.fixture(params=[run_local, run_processes], ids=["threads", "processes"])
def run(request: pytest.FixtureRequest) -> Run:
    return request.param  # type: ignore[no-any-return]


def _grid(data_parallel: int) -> dict[str, Any]:
    mesh = make_mesh(data_parallel, device="cpu")
    sums = []
    for group in (mesh.world, mesh.pipeline, mesh.replicas):
        tensor = torch.tensor(10**mesh.rank)  # a decimal digit for each rank that was added
        group.all_reduce(tensor)
        sums.append(int(tensor))
    return {
        "place": (mesh.rank, mesh.data_rank, mesh.pipe_rank),
        "sizes": (mesh.size, mesh.data, mesh.pipe),
        "groups": (mesh.pipeline.ranks, mesh.replicas.ranks),
        "sums": tuple(sums),
        "inverse": mesh.world_rank(mesh.data_rank, mesh.pipe_rank) == mesh.rank,
        "device": str(mesh.device),
    }


def _grids(*data_parallel: int) -> list[dict[str, Any]]:
    return [_grid(data) for data in data_parallel]


def _expected(rank: int, size: int, data: int) -> dict[str, Any]:
    pipe = size // data
    row, column = rank // pipe, rank % pipe
    pipeline = tuple(range(row * pipe, row * pipe + pipe))
    replicas = tuple(range(column, size, pipe))
    return {
        "place": (rank, row, column),
        "sizes": (size, data, pipe),
        "groups": (pipeline, replicas),
        "sums": tuple(sum(10**r for r in ranks) for ranks in (range(size), pipeline, replicas)),
        "inverse": True,
        "device": "cpu",
    }


@pytest.mark.parametrize(("ranks", "grids"), [(4, (1, 2, 4, 2)), (3, (3, 1))], ids=str)
def test_coordinates_and_groups(run: Run, ranks: int, grids: tuple[int, ...]) -> None:
    results = run(_grids, ranks, *grids)
    assert results == [[_expected(rank, ranks, data) for data in grids] for rank in range(ranks)]


def test_a_process_alone_is_a_world_of_one() -> None:
    assert _grid(1) == _expected(0, 1, 1)
    assert not dist.is_initialized()


def _refused(data_parallel: int) -> str:
    with pytest.raises(WorldSizeError) as caught:
        make_mesh(data_parallel, device="cpu")
    return str(caught.value)


def test_a_world_that_cannot_be_split_evenly(run: Run) -> None:
    assert (
        run(_refused, 4, 3)
        == ["4 ranks cannot form 3 pipelines of equal length: set data_parallel to 1 or 2 or 4, or start 3 or 6 ranks"]
        * 4
    )
    assert _refused(2) == ("1 rank cannot form 2 pipelines of equal length: set data_parallel to 1, or start 2 ranks")


def test_no_pipelines_at_all() -> None:
    with pytest.raises(ConfigError, match="data_parallel is 0; it must be 1 or more"):
        make_mesh(0)


def _twice() -> str:
    mesh = make_mesh(device="cpu")
    assert mesh.pipeline is mesh.world
    assert make_mesh(device="cpu").world is mesh.world
    return str(mesh.replicas.ranks)


def test_groups_are_made_once(run: Run) -> None:
    assert run(_twice, 2) == ["(0,)", "(1,)"]


def _boards() -> list[tuple[int, int]]:
    mesh = make_mesh(device="cpu")
    mesh.board.begin(5)
    mesh.board.at(100 + mesh.rank)
    if mesh.rank == 1:
        mesh.board.fail(5)
    mesh.world.barrier()
    states = [(mesh.board.state(rank).code, int(mesh.board.failed(rank, 5))) for rank in range(mesh.size)]
    mesh.world.barrier()
    return states


def test_all_ranks_of_a_host_see_one_board(run: Run) -> None:
    assert run(_boards, 3) == [[(100, 0), (101, 1), (102, 0)]] * 3


def _left_files() -> tuple[list[str], int]:
    mesh = make_mesh(device="cpu")
    named = [name for name in os.listdir("/dev/shm") if name.startswith("pipeloom-")]
    return named, mesh.board.state(mesh.rank).code


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="this system has no /dev/shm")
def test_the_board_leaves_no_file() -> None:
    assert run_processes(_left_files, 2)[0] == ([], At.OUTSIDE)


def _random_locks() -> list[bool]:
    mesh = make_mesh(device="cpu")
    return [mesh.random_lock is None]


def test_ranks_that_share_a_generator_share_a_lock() -> None:
    assert run_local(_random_locks, 2) == [[False]] * 2
    assert run_local(_random_locks, 1) == [[True]]
    assert run_processes(_random_locks, 2) == [[True]] * 2


def _own_group() -> tuple[bool, int, tuple[str, ...] | None]:
    """What the user's script has made stays the user's: messages in it do not meet the engine's."""
    dist.init_process_group("gloo")
    mesh = make_mesh(2, device="cpu")
    tensor, other = torch.tensor([1]), torch.tensor([2])
    if mesh.rank == 0:
        work = dist.isend(other, 1, tag=LANE_F)
        mesh.link.send(1, tensor, LANE_F).wait()
        work.wait()
    else:
        mesh.link.receive(0, tensor, LANE_F).wait()
        dist.recv(other, 0, tag=LANE_F)
    axes = device_mesh(mesh)
    return (int(tensor), int(other)) == (1, 2), axes["data"].get_local_rank(), axes.mesh_dim_names


def test_a_process_group_of_the_users_and_a_device_mesh() -> None:
    assert run_processes(_own_group, 2) == [(True, rank, ("data", "pipe")) for rank in range(2)]


# -- devices -------------------------------------------------------------------------------------------------


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="device is 'gpu'; it must be one of auto, cpu, cuda"):
        make_mesh(device="gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch finds no such device here; set device to auto or cpu"):
        make_mesh(device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="rank 2 of this host has no accelerator of its own, there are 2"):
        devices.process_device("auto", 2)
    with pytest.raises(ConfigError, match="the process group was initialized with cpu:gloo,cuda:gloo"):
        devices.process_device("cuda", 0, "cpu:gloo,cuda:gloo")
    assert devices.process_device("auto", 0, "cpu:gloo,cuda:gloo") == torch.device("cpu")


def test_backends_follow_the_device() -> None:
    cpu, accelerator = torch.device("cpu"), torch.device("cuda", 1)
    assert [devices.backend_of(d) for d in (cpu, accelerator)] == ["gloo", "cpu:gloo,cuda:nccl"]
    assert [devices.transfer_backend(d) for d in (cpu, accelerator)] == ["gloo", "nccl"]
    assert [devices.uses_streams(d) for d in (cpu, accelerator)] == [False, True]


def test_on_the_host_nothing_is_queued() -> None:
    cpu = torch.device("cpu")
    devices.synchronise(cpu)
    assert devices.timing_event(cpu) is None
    assert devices.generator_of(cpu) is torch.default_generator
    assert devices.on_host(torch.zeros(1))
    with devices.autocast(cpu, None):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
    with devices.autocast(cpu, torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16


@pytest.mark.cuda
def test_an_accelerator_has_events_and_a_generator_of_its_own() -> None:
    device = devices.process_device("cuda", 0)
    event = devices.timing_event(device)
    assert event is not None
    event.record()
    devices.synchronise(device)
    assert event.query()
    assert devices.generator_of(device).device.type == "cuda"
    assert not devices.on_host(torch.zeros(1, device=device))


def test_a_rank_outside_of_all_parts_is_refused() -> None:
    assert own_part([range(2), range(2, 4)], 3) == (2, 3)
    with pytest.raises(LinkError, match="rank 4 is in none of the parts"):
        own_part([range(2), range(2, 4)], 4)

"""The orders of torch.distributed.pipelining, row for row."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from schedules import Costs, Op, Program, Schedule, build, facts, simulate

ORDERS = [
    ("ScheduleGPipe", [(1, 4, 8), (1, 3, 2)], {}),
    ("ScheduleInterleaved1F1B", [(2, 4, 8), (2, 4, 4), (2, 4, 10), (2, 4, 20), (2, 3, 2), (3, 2, 6), (3, 4, 12)], {}),
    ("ScheduleLoopedBFS", [(1, 3, 4), (2, 4, 8), (2, 4, 3), (3, 2, 5)], {}),
    ("ScheduleInterleavedZeroBubble", [(1, 4, 8), (2, 4, 8), (2, 4, 10), (4, 4, 8), (4, 8, 32), (3, 3, 2)], {}),
    ("ScheduleZBVZeroBubble", [(2, 4, 8), (2, 4, 7), (2, 4, 3), (2, 8, 32), (2, 1, 2), (2, 5, 4)], {}),
    ("ScheduleDualPipeV", [(2, 4, 8), (2, 4, 13), (2, 8, 32), (2, 1, 2), (2, 3, 6)], {"overlapped": True}),
]  # stages per rank, ranks, micro-batches


@pytest.mark.parametrize(("theirs", "shapes", "options"), ORDERS, ids=[name for name, *_ in ORDERS])
def test_row_for_row(theirs: str, shapes: list[tuple[int, int, int]], options: dict[str, object]) -> None:
    """In shapes that torch allows; there is an order for all others as well."""
    module = pytest.importorskip("torch.distributed.pipelining.schedules")
    if not hasattr(module, theirs):
        pytest.skip(f"this torch has no {theirs}")
    for stages_per_rank, ranks, micro_batches in shapes:
        order = order_of_torch(getattr(module, theirs), ranks, stages_per_rank, micro_batches)
        assert written(build(
            theirs, ranks=ranks, micro_batches=micro_batches, stages_per_rank=stages_per_rank, **options
        )) == order  # fmt: skip


def test_1f1b_but_for_the_last_rank() -> None:
    """torch lists forwards 1 to m there; it runs 0 to m - 1, as all do."""
    module = pytest.importorskip("torch.distributed.pipelining.schedules")
    order = order_of_torch(module.Schedule1F1B, 4, 1, 8)
    ours = written(build("Schedule1F1B", ranks=4, micro_batches=8))
    assert ours[:-1] == order[:-1]
    assert [cell for cell in ours[-1] if "B" in cell] == [cell for cell in order[-1] if "B" in cell]
    assert [cell for cell in ours[-1] if "F" in cell] == [f"3F{number}" for number in range(8)]


def test_every_schedule_class_of_torch_is_known() -> None:
    module = pytest.importorskip("torch.distributed.pipelining.schedules")
    classes = {name for name in vars(module) if name.startswith("Schedule") and name != "ScheduleBase"}
    for name in sorted(classes):
        assert name in facts(name).aliases


@pytest.mark.parametrize(
    ("name", "shape"),
    [("interleaved-1f1b", (4, 8)), ("zb-v", (4, 8)), ("interleaved-zb", (3, 6)), ("dualpipe-v", (3, 6))],
)
def test_the_programs_of_torch_are_read_and_proved(tmp_path: Path, name: str, shape: tuple[int, int]) -> None:
    """What its lowering makes of the same order, with its reductions and with parameters made whole ahead."""
    module = pytest.importorskip("torch.distributed.pipelining.schedules")
    schedule = build(name, ranks=shape[0], micro_batches=shape[1])
    rows = [[module._Action.from_str(cell) for cell in row] for row in written(schedule)]
    rows = [module._add_unshard_reshard(row) for row in rows]
    rows = [module._add_reduce_grad(row, schedule.micro_batches) for row in rows]
    lowered = module._add_send_recv(dict(enumerate(rows)), schedule.rank_of_stage.__getitem__, schedule.num_stages)
    path = tmp_path / f"{name}.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(lowered[rank] for rank in range(schedule.ranks))
    program = Program.from_csv(path)
    assert program.schedule == schedule
    for rank, row in enumerate(program.rows):
        assert sum(one.op is Op.UNSHARD for one in row) == sum(one.op is Op.RESHARD for one in row) > 0
        assert {one.stage for one in row if one.op is Op.REDUCE_GRAD} == set(schedule.stages_of_rank(rank))
    timeline = simulate(program, Costs(unshard=0.5, reduce=0.5, step=0.5))
    assert timeline.step_time > simulate(schedule).step_time


def written(schedule: Schedule) -> list[list[str]]:
    return [list(map(str, row)) for row in schedule.rows]


def order_of_torch(kind: type[Any], ranks: int, stages_per_rank: int, micro_batches: int) -> list[list[str]]:
    """The action lists of a schedule class, without its stages or process groups."""
    made = object.__new__(kind)
    made.__dict__.update(
        pp_group_size=ranks, n_local_stages=stages_per_rank, _n_microbatches=micro_batches,
        _num_stages=ranks * stages_per_rank, num_stages=ranks * stages_per_rank, pipeline_order={},
        _stages=[SimpleNamespace()] * stages_per_rank, number_of_rounds=max(1, micro_batches // ranks),
    )  # fmt: skip
    made.__dict__["microbatches_per_round"] = micro_batches // made.number_of_rounds
    if hasattr(made, "_calculate_single_rank_operations"):
        order = {rank: made._calculate_single_rank_operations(rank) for rank in range(ranks)}
    else:
        order = made._get_pipeline_order()
    return [[str(one) for one in order[rank] if one is not None and one.is_compute_op] for rank in range(ranks)]

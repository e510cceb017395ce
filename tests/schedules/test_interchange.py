"""CSV files in torch's form, both ways."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import given, settings

from schedules import Action, Pair, Program, Schedule, build, names
from schedules.errors import DeadlockError, IllegalProgram, IllegalSchedule, UnreadableSchedule
from tests.schedules.pictures import rows
from tests.schedules.strategies import legal_schedules


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("micro_batches", [2, 5, 8])
def test_what_is_written_is_read_back(tmp_path: Path, name: str, micro_batches: int) -> None:
    """With two micro-batches or more, so that both routes show where there are two."""
    schedule = build(name, ranks=4, micro_batches=micro_batches)
    schedule.to_csv(tmp_path / "order.csv")
    assert Schedule.from_csv(tmp_path / "order.csv", name=name) == schedule


@given(legal_schedules())
@settings(max_examples=50)
def test_rows_survive_whatever_they_are(tmp_path_factory: pytest.TempPathFactory, schedule: Schedule) -> None:
    path = tmp_path_factory.getbasetemp() / "random.csv"
    schedule.to_csv(path)
    with path.open(newline="") as file:
        assert [list(map(str, row)) for row in schedule.rows] == list(csv.reader(file))
    read = Schedule.from_csv(path)
    assert read.name == "random"
    assert read.rows[: len(read.rows)] == schedule.rows[: len(read.rows)]


def test_placement_is_read_off_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "v.csv"
    path.write_text("0F0,,,3F0,3B0,,0B0\r\n,1F0,2F0,,2I0,1B0,2W0\r\n\r\n")
    schedule = Schedule.from_csv(path)
    assert schedule.rank_of_stage == (0, 1, 1, 0)
    assert (schedule.name, schedule.ranks, schedule.stages_per_rank) == ("v", 2, 2)
    assert [str(action) for action in schedule.rows[1]] == ["1F0", "2F0", "2I0", "1B0", "2W0"]


def test_two_routes_are_read_off_the_rows(tmp_path: Path) -> None:
    both_ways = Schedule.from_rows(
        "both-ways", rows("0F0 3F1 3B1 0B0 \n 2F1 1F0 1B0 2B1"), [0, 1, 1, 0],
        routes=[(0, 1), (2, 3)], layer_group_of_stage=[0, 1, 0, 1],
    )  # fmt: skip
    both_ways.to_csv(tmp_path / "both-ways.csv")
    assert Schedule.from_csv(tmp_path / "both-ways.csv") == both_ways


def test_communication_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "comms.csv"
    path.write_text(
        "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD\n1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD\n"
    )
    assert Schedule.from_csv(path).rows == Schedule.from_rows("", rows("0F0 0B0 \n 1F0 1B0"), [0, 1]).rows


def test_a_program_is_read_as_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "comms.csv"
    path.write_text(
        "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD\n1UNSHARD,1RECV_F0,,1F0,1I0,1SEND_B0,1W0\n"
    )
    program = Program.from_csv(path)
    assert [" ".join(f"{one}," for one in row) for row in program.rows] == [
        "UNSHARD 0, 0F0, SEND_F 0F0 to 1, RECV_B 0B0 from 1, 0B0, REDUCE_GRAD 0, RESHARD 0, WAIT_SEND 0F0, STEP,",
        "UNSHARD 1, RECV_F 1F0 from 0, 1F0, 1I0, SEND_B 1I0 to 0, 1W0, REDUCE_GRAD 1, WAIT_SEND 1I0, STEP,",
    ]


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("0F0,0B0\n1F0,1B0\n", IllegalProgram, "some message of the schedule is not sent"),
        ("0F0,0SEND_F0,0B0\n1F0,1B0\n", IllegalProgram, "some channel has more sends than receives"),
        (
            "0F0,0SEND_F0,0SEND_B0,0B0\n1F0,1B0\n",
            UnreadableSchedule,
            "line 1, column 3: nothing is there that 0SEND_B0",
        ),
        ("0F0,0SEND_F7,0B0\n1F0,1B0\n", UnreadableSchedule, "line 1, column 2: nothing is there that 0SEND_F7"),
        (
            "0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1B0,1SEND_B0,1RECV_F0\n",
            IllegalProgram,
            "rank 1's RECV_F 1F0 from 0 stands after its message is needed",
        ),
        (
            "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n",
            DeadlockError,
            "rank 0's SEND_F 0F1 to 1 waits for rank 1's SEND_B 1B0 to 0",
        ),
    ],
)
def test_a_program_that_cannot_run_is_refused(tmp_path: Path, text: str, error: type[Exception], message: str) -> None:
    path = tmp_path / "wrong.csv"
    path.write_text(text)
    with pytest.raises(error, match=message):
        Program.from_csv(path)
    if error is DeadlockError:
        Program.from_csv(path, depth=1)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("", UnreadableSchedule, "has no action in it; it must have one line a rank"),
        ("0F0,0B0\n1F0,1Q0\n", UnreadableSchedule, "line 2, column 2: '1Q0' is not an action"),
        ("0F0,0B0\n2F0,2B0\n", UnreadableSchedule, "stage 1 is on no line"),
        ("0F0,0B0\n1F0\n", IllegalSchedule, "1B0 runs never"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1B1\n", IllegalSchedule, "1F1 runs never"),
        ("0F0,0B0\n1F0,0F1,1B0,0B1\n", IllegalSchedule, "rank 1 runs 0F1, but that stage is on rank 0"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, error: type[Exception], message: str) -> None:
    path = tmp_path / "wrong.csv"
    path.write_text(text)
    with pytest.raises(error, match=message):
        Schedule.from_csv(path)


def test_torch_reads_every_cell_as_we_mean_it() -> None:
    theirs = pytest.importorskip("torch.distributed.pipelining.schedules")
    pair = Pair(Action.parse("2F0"), Action.parse("3B1"))
    for entry in (*map(Action.parse, ("2F0", "2B10", "2I0", "2W0")), pair):
        read = theirs._Action.from_str(str(entry))
        assert repr(read) == str(entry)
        assert read.is_compute_op

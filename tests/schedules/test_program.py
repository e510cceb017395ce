"""Lowering and its proof: literal programs, where sends are completed, and what the proof refuses."""

from __future__ import annotations

import dataclasses

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import Action, Instruction, Kind, Op, Pair, Program, Schedule, build, lower, prove
from schedules.action import actions_of
from schedules.errors import DeadlockError, IllegalProgram
from schedules.program import ACTION, CODE, OP
from schedules.prove import _all_meet, _match, _run
from tests.schedules.strategies import legal_schedules


def text(program: Program, rank: int) -> list[str]:
    """A row as words."""
    return [str(instruction) for instruction in program.rows[rank]]


def moved(program: Program, rank: int, source: int, target: int) -> Program:
    """The program with one instruction of a rank elsewhere in its row."""
    table, start = program.instructions.copy(), program.row_starts[rank]
    row = table[start : program.row_starts[rank + 1]].tolist()
    row.insert(target, row.pop(source))
    table[start : start + len(row)] = row
    return dataclasses.replace(program, instructions=table)


def test_two_ranks_in_full() -> None:
    program = lower(build("1f1b", ranks=2, micro_batches=2))
    assert text(program, 0) == [
        "0F0", "SEND_F 0F0 to 1", "0F1", "SEND_F 0F1 to 1",
        "RECV_B 0B0 from 1", "0B0", "WAIT_SEND 0F0",
        "RECV_B 0B1 from 1", "0B1", "WAIT_SEND 0F1", "REDUCE_GRAD 0", "STEP",
    ]  # fmt: skip
    assert text(program, 1) == [
        "RECV_F 1F0 from 0", "RECV_F 1F1 from 0", "1F0", "1B0", "SEND_B 1B0 to 0",
        "1F1", "1B1", "SEND_B 1B1 to 0", "REDUCE_GRAD 1", "WAIT_SEND 1B0", "WAIT_SEND 1B1", "STEP",
    ]  # fmt: skip
    assert program.rows[0][4] == Instruction(Op.RECV_B, Action(0, Kind.B, 0), peer=1)
    assert program.rows[0][-2:] == (Instruction(Op.REDUCE_GRAD, None, stage=0), Instruction(Op.STEP, None))


def test_a_program_without_backward_ends_with_its_sends() -> None:
    program = lower(build("forward-only", ranks=2, micro_batches=2))
    assert text(program, 0) == [
        "0F0", "SEND_F 0F0 to 1", "0F1", "SEND_F 0F1 to 1", "WAIT_SEND 0F0", "WAIT_SEND 0F1",
    ]  # fmt: skip
    assert text(program, 1) == ["RECV_F 1F0 from 0", "RECV_F 1F1 from 0", "1F0", "1F1"]


def test_one_rank_sends_nothing() -> None:
    program = lower(build("interleaved-1f1b", ranks=1, micro_batches=1, stages_per_rank=2))
    assert text(program, 0) == ["0F0", "1F0", "1B0", "REDUCE_GRAD 1", "0B0", "REDUCE_GRAD 0", "STEP"]
    assert program.messages == {}


def test_a_reply_shows_that_a_message_arrived() -> None:
    """In the steady state a gradient is let go when the next activation from its receiver is there."""
    program = lower(build("1f1b", ranks=2, micro_batches=4))
    row = text(program, 1)
    assert row.index("WAIT_SEND 1B0") == row.index("1F2") + 1
    assert row.index("WAIT_SEND 1B1") == row.index("1F3") + 1
    assert row[-3:] == ["WAIT_SEND 1B2", "WAIT_SEND 1B3", "STEP"], "nothing comes back after these"


def test_messages_by_channel_and_lane() -> None:
    program = lower(build("interleaved-1f1b", ranks=2, micro_batches=1, stages_per_rank=2))

    def written(messages: tuple[tuple[Action, Action], ...]) -> list[str]:
        return [f"{producer}>{consumer}" for producer, consumer in messages]

    assert {channel: written(messages) for channel, messages in program.messages.items()} == {
        (0, 1): ["0F0>1F0", "2F0>3F0", "2B0>1B0"],
        (1, 0): ["1F0>2F0", "3B0>2B0", "1B0>0B0"],
    }
    assert written(program.lane(0, 1, "F")) == ["0F0>1F0", "2F0>3F0"]
    assert written(program.lane(0, 1, "B")) == ["2B0>1B0"]
    assert program.lane(0, 5, "B") == ()


def test_a_pair_is_one_instruction_that_sends_both_results_after_it() -> None:
    a = Action.parse
    schedule = Schedule.from_rows(
        "pairs",
        [
            [a("0F0"), a("0F1"), a("0B0"), a("0B1")],
            [a("1F0"), Pair(a("1F1"), a("1B0")), a("1B1")],
            [a("2F0"), a("2B0"), a("2F1"), a("2B1")],
        ],
        [0, 1, 2],
    )
    row = lower(schedule).rows[1]
    at = next(n for n, instruction in enumerate(row) if instruction.op is Op.PAIR)
    assert row[at].action == Pair(a("1F1"), a("1B0"))
    assert [str(one) for one in row[at + 1 : at + 3]] == ["SEND_F 1F1 to 2", "SEND_B 1B0 to 0"]
    assert {"RECV_F 1F1 from 0", "RECV_B 1B0 from 2"} <= {str(one) for one in row[:at]}


@given(legal_schedules())
@settings(max_examples=200)
def test_any_legal_schedule_has_a_program(schedule: Schedule) -> None:
    program = lower(schedule)
    for depth in (0, 1, 3):
        prove(program, depth)
    for rank, row in enumerate(program.rows):
        passes = [one.action for one in row if one.op in (Op.F, Op.B, Op.I, Op.W, Op.PAIR)]
        assert tuple(passes) == schedule.rows[rank]
        place = {(one.op is Op.WAIT_SEND, one.action): n for n, one in enumerate(row) if one.peer >= 0}
        for instruction in row:
            if instruction.op in (Op.SEND_F, Op.SEND_B):
                assert place[True, instruction.action] > place[False, instruction.action]
        if not schedule.forward_only:
            reduced = [one.stage for one in row if one.op is Op.REDUCE_GRAD]
            assert sorted(reduced) == list(schedule.stages_of_rank(rank))
            assert row[-1].op is Op.STEP


@given(legal_schedules(), st.integers(0, 1000))
@settings(max_examples=100)
def test_completing_a_send_before_the_step_never_blocks(schedule: Schedule, seed: int) -> None:
    """Wherever a WAIT_SEND does not stand at the end, its receiver has completed the receive in every execution.

    Checked by the longest chain of what must have happened before, entry by entry.
    """
    graph, program = schedule.graph(), lower(schedule)
    consumer = {a: b for messages in program.messages.values() for a, b in messages}
    entry_of = {action: entry for row in schedule.rows for entry in row for action in actions_of(entry)}
    for row in program.rows:
        last_pass = max((n for n, one in enumerate(row) if one.op in (Op.F, Op.B, Op.I, Op.W, Op.PAIR)), default=0)
        for n, instruction in enumerate(row[:last_pass]):
            if instruction.op is Op.WAIT_SEND and isinstance(instruction.action, Action):
                before = [one.action for one in row[:n] if one.op in (Op.F, Op.B, Op.I, Op.W, Op.PAIR)][-1]
                assert networkx.has_path(graph, entry_of[consumer[instruction.action]], before)


def test_the_proof_prints_the_circle() -> None:
    """Both ranks send before they receive: nobody has posted what the other blocks on."""
    program = lower(build("1f1b", ranks=2, micro_batches=3))
    row = text(program, 1)
    wrong = moved(program, 1, row.index("RECV_F 1F1 from 0"), row.index("SEND_B 1B0 to 0"))
    expected = """these wait for each other, so none of them can ever run:
  rank 0's SEND_F 0F1 to 1 waits for rank 1's SEND_B 1B0 to 0
  rank 1's SEND_B 1B0 to 0 waits for rank 0's SEND_F 0F1 to 1"""
    with pytest.raises(DeadlockError) as caught:
        prove(wrong)
    assert str(caught.value) == expected
    prove(wrong, depth=1)


@given(legal_schedules(), st.data())
@settings(max_examples=200)
def test_both_proofs_of_meetings_agree(schedule: Schedule, data: st.DataObject) -> None:
    """The short one finds the same programs to end as the one that goes through all instructions, and no others."""
    changed = lower(schedule)
    rank = np.repeat(np.arange(schedule.ranks), np.diff(changed.row_starts))
    for _ in range(data.draw(st.integers(0, 3))):
        row = data.draw(st.integers(0, schedule.ranks - 1))
        source, target = (data.draw(st.integers(0, max(0, len(changed.rows[row]) - 1))) for _ in range(2))
        changed = moved(changed, row, source, target) if changed.rows[row] else changed
    try:
        transfers = _match(changed, rank)
    except IllegalProgram:
        return  # two messages of one channel have changed places
    try:
        _run(changed, rank, transfers, 0)
        ends = True
    except DeadlockError:
        ends = False
    assert _all_meet(schedule.ranks, rank, transfers) is ends


def test_the_proof_refuses_what_is_not_the_schedule() -> None:
    program = lower(build("1f1b", ranks=2, micro_batches=3))
    row = text(program, 0)
    with pytest.raises(IllegalProgram, match="passes are not those of 1f1b"):
        prove(moved(program, 0, row.index("0F1"), 0))
    with pytest.raises(IllegalProgram, match="rank 0's SEND_F 0F1 to 1 stands before its result is made"):
        prove(moved(program, 0, row.index("SEND_F 0F1 to 1"), row.index("0F1")))
    with pytest.raises(IllegalProgram, match="rank 0's RECV_B 0B0 from 1 stands after its message is needed"):
        prove(moved(program, 0, row.index("RECV_B 0B0 from 1"), row.index("0B0")))
    with pytest.raises(IllegalProgram, match="rank 0's SEND_F 0F1 to 1 meets rank 1's RECV_F 1F0 from 0"):
        prove(moved(program, 0, row.index("SEND_F 0F0 to 1"), row.index("SEND_F 0F1 to 1")))
    table = program.instructions.copy()
    table[0, OP] = CODE[Op.B]
    with pytest.raises(IllegalProgram, match="passes are not those of 1f1b"):
        prove(dataclasses.replace(program, instructions=table))
    with pytest.raises(IllegalProgram, match="some send is not completed by one WAIT_SEND behind it"):
        prove(moved(program, 0, row.index("WAIT_SEND 0F0"), 0))


def test_the_proof_refuses_lost_and_misled_messages() -> None:
    program = lower(build("1f1b", ranks=2, micro_batches=2))
    table = program.instructions.copy()
    keep = np.flatnonzero(table[:, OP] != CODE[Op.SEND_B])
    starts = tuple(np.searchsorted(keep, program.row_starts).tolist())
    with pytest.raises(IllegalProgram, match="some channel has more sends than receives"):
        prove(dataclasses.replace(program, instructions=table[keep], row_starts=starts))
    elsewhere = table.copy()
    elsewhere[elsewhere[:, OP] == CODE[Op.SEND_F], ACTION] = 5
    with pytest.raises(IllegalProgram, match="rank 0's SEND_F 1B0 to 1 is for an action that another rank runs"):
        prove(dataclasses.replace(program, instructions=elsewhere))
    for before, after in ((Op.SEND_B, Op.SEND_F), (Op.RECV_B, Op.RECV_F)):
        table[table[:, OP] == CODE[before], OP] = CODE[after]
    with pytest.raises(IllegalProgram, match="in the lane of the other direction"):
        prove(dataclasses.replace(program, instructions=table))


def test_every_op_is_readable() -> None:
    action = Action(2, Kind.F, 5)
    assert [str(Instruction(op, action, peer=1, stage=3)) for op in Op] == [
        "2F5", "2F5", "2F5", "2F5", "2F5",
        "SEND_F 2F5 to 1", "RECV_F 2F5 from 1", "SEND_B 2F5 to 1", "RECV_B 2F5 from 1", "WAIT_SEND 2F5",
        "UNSHARD 3", "RESHARD 3", "REDUCE_GRAD 3", "STEP",
    ]  # fmt: skip

"""Orders of forwards and input gradients to begin with: turns of micro-batches in a loop, repeated blocks in a V.

Passes are the numbers of ``schedules.greedy``; an order has one list a rank. Where the W go, and which passes are
pulled forward, is for ``schedules.greedy.arrange`` to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, product
from typing import NamedTuple

import numpy as np

from schedules.placement import Placement
from schedules.schedule import Schedule
from schedules.table import KIND, STAGE, B, F, Table, W


def in_turns(placement: Placement, micro_batches: int, turn: int, ahead: Sequence[int]) -> list[list[int]]:
    """Turns of about ``turn`` micro-batches go through all stages of a rank, as in interleaved 1F1B.

    Rank r runs ``ahead[r]`` forwards, then an input gradient and a forward in turn. With one stage a rank, that is
    1F1B, ZB-H1 or ZB-H2.
    """
    m, stages = micro_batches, len(placement.rank_of_stage)
    turns = [numbers.tolist() for numbers in np.array_split(np.arange(m), max(1, m // turn))]
    orders = []
    for rank, first in enumerate(ahead):
        own = placement.stages_of_rank(rank)
        forwards = [stage * m + number for numbers in turns for stage in own for number in numbers]
        backwards = [(stages + stage) * m + number for numbers in turns for stage in own[::-1] for number in numbers]
        first = max(1, min(first, len(forwards)))
        pairs = zip(backwards, forwards[first:], strict=False)
        orders.append([*forwards[:first], *chain.from_iterable(pairs), *backwards[len(forwards) - first :]])
    return orders


class Block(NamedTuple):
    """The passes of one micro-batch in a V, in slots: those between neighbouring ranks, and at a turn."""

    first_f: int
    second_f: int
    second_i: int
    first_i: int
    turn: int
    """Between the last F, which is on rank 0, and the first I."""


def in_blocks(block: Block, period: int, ranks: int, micro_batches: int) -> list[list[int]]:
    """In a V, the block of each micro-batch ``period`` slots after that of the one before."""
    p, m = ranks, micro_batches
    rank = np.arange(p)
    lanes = np.stack([rank, 2 * p - 1 - rank, 4 * p - 1 - rank, 2 * p + rank])
    slots = _slots(block, p)[..., None] + period * np.arange(m)
    numbers = lanes[..., None] * m + np.arange(m)
    slots, numbers = (array.transpose(1, 0, 2).reshape(p, -1) for array in (slots, numbers))
    order: list[list[int]] = np.take_along_axis(numbers, np.argsort(slots, axis=1, kind="stable"), axis=1).tolist()
    return order


def blocks(ranks: int, chunks: float) -> Iterator[Block]:
    """Blocks that can be repeated every 6 slots without a collision and hold at most about so many passes a rank.

    6 slots are the F, I and W of a rank's two stages (arXiv 2405.15362, appendix A).
    """
    for first_f, second_f, second_i, first_i in product((1, 2, 4, 5), (1, 2, 4, 5), (1, 2, 4, 5), (1, 2, 4, 5)):
        for turn in range(1, 7):
            block = Block(first_f, second_f, second_i, first_i, turn)
            slots = _slots(block, ranks)
            if any(len(set(column)) < 4 for column in (slots % 6).T.tolist()):
                continue
            lives = (slots[3] - slots[0] + slots[2] - slots[1]) / 6
            if lives.max() + 1 <= chunks:
                yield block
                break


def _slots(block: Block, ranks: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """The slots of the first micro-batch's F, second F, second I and first I, shape (4, ranks)."""
    rank = np.arange(ranks)
    first_f = block.first_f * rank
    second_f = first_f[-1] + 1 + block.second_f * rank[::-1]
    second_i = second_f[0] + block.turn + block.second_i * rank
    first_i = second_i[-1] + 1 + block.first_i * rank[::-1]
    return np.stack([first_f, second_f, second_i, first_i])


def of_schedule(schedule: Schedule) -> list[list[int]]:
    """The rows of a schedule with one route as numbers, every backward in two parts.

    Passes of one kind on one stage are put in order of micro-batches, which makes no start later: whatever the k-th of
    them takes in has been made k times by then.
    """
    m, stages = schedule.micro_batches, schedule.num_stages
    rows = []
    for rank in range(schedule.ranks):
        table = schedule.table(rank)
        whole = table[:, KIND] == B
        lines: Table = np.repeat(table, np.where(whole, 2, 1), axis=0)
        kind = lines[:, KIND]
        part = np.where(kind == F, 0, np.where(kind == W, 2, 1))
        part[kind == B] = np.tile([1, 2], int(whole.sum()))
        lane = part * stages + lines[:, STAGE]
        count = np.zeros(len(lane), dtype=np.int64)
        for one in np.unique(lane):
            places = np.flatnonzero(lane == one)
            count[places] = np.arange(len(places))
        rows.append((lane * m + count).tolist())
    return rows

"""Rows of passes in a fixed order: when each pass ends, how long the way from it to the end is, what is critical.

Passes are numbered as in ``schedules.greedy``. Everything is a list, because a search reads single items of rows that
differ a little each time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import add
from typing import NamedTuple

from schedules.greedy import EPSILON, Lanes

Rows = list[list[int]]


@dataclass(frozen=True, slots=True)
class Network:
    """What holds for every order of the passes; each list has an item a pass, -1 for "none"."""

    seconds: list[float]
    sender: list[int]
    """The pass of another rank whose message is taken in."""
    receiver: list[int]
    """The pass of another rank that takes in the result."""
    delay: list[float]
    """How long the message to take in travels."""
    before: list[tuple[int, ...]]
    """The passes of the same rank that it must follow."""
    change: list[float]
    """By how much it changes what its rank holds."""
    lead: list[float]
    """What counts beyond the end of each rank; see ``Lanes.lead``."""

    @staticmethod
    def of(lanes: Lanes) -> Network:
        """The network of a task."""
        stages, m = lanes.stages, lanes.micro_batches
        count = 3 * stages * m
        sender, receiver, delay = [-1] * count, [-1] * count, [0.0] * count
        before: list[tuple[int, ...]] = [()] * count
        for lane in range(2 * stages):
            after = lanes.follows[lane]
            for number in range(lane * m, (lane + 1) * m):
                before[number + stages * m] = (*before[number + stages * m], number)  # F, I, W of a stage
                if after >= 0:
                    follower = number + (after - lane) * m
                    if lanes.rank[lane] == lanes.rank[after]:
                        before[follower] = (*before[follower], number)
                    else:
                        sender[follower], receiver[number], delay[follower] = number, follower, lanes.delay[lane]
        for number in range(count):
            if number % m:
                before[number] = (*before[number], number - 1)  # in order of micro-batches
        seconds, change = ([one for one in each for _ in range(m)] for each in (lanes.seconds, lanes.change))
        return Network(seconds, sender, receiver, delay, before, change, lanes.lead)


class Times(NamedTuple):
    """When the passes of given rows end at the earliest."""

    score: float
    """The step time, or what ``Network.lead`` makes of it."""
    end: list[float]
    order: list[int]
    """The passes, each behind all that it waits for."""


def times(network: Network, rows: Rows) -> Times | None:
    """Run the rows; None where ranks wait for each other in a circle."""
    seconds, sender, delay = network.seconds, network.sender, network.delay
    end = [-1.0] * len(seconds)
    place, free = [0] * len(rows), [0.0] * len(rows)
    order: list[int] = []
    waiting: dict[int, int] = {}
    runnable = list(range(len(rows)))
    while runnable:
        rank = runnable.pop()
        row, at, time = rows[rank], place[rank], free[rank]
        while at < len(row):
            number = row[at]
            source = sender[number]
            if source >= 0:
                sent = end[source]
                if sent < 0.0:
                    waiting[source] = rank
                    break
                time = max(time, sent + delay[number])
            time += seconds[number]
            end[number] = time
            order.append(number)
            at += 1
            if number in waiting:
                runnable.append(waiting.pop(number))
        place[rank], free[rank] = at, time
    return None if waiting else Times(max(map(add, free, network.lead)), end, order)


def tails(network: Network, rows: Rows, order: Sequence[int]) -> list[float]:
    """From the start of each pass to the end of the step, what counts beyond it included, at least."""
    seconds, receiver, delay = network.seconds, network.receiver, network.delay
    following = [-1] * len(seconds)
    beyond = [0.0] * len(seconds)
    for row, lead in zip(rows, network.lead, strict=True):
        for number, after in pairwise(row):
            following[number] = after
        for number in row[-1:]:
            beyond[number] = lead
    tail = [0.0] * len(seconds)
    for number in reversed(order):
        after, other = following[number], receiver[number]
        longest = tail[after] if after >= 0 else beyond[number]
        if other >= 0:
            longest = max(longest, tail[other] + delay[other])
        tail[number] = longest + seconds[number]
    return tail


class Block(NamedTuple):
    """Passes of one rank that follow each other without a gap on a critical path: row[first : last + 1]."""

    rank: int
    first: int
    last: int


def critical_blocks(
    network: Network, rows: Rows, found: Times, tail: Sequence[float], chance: random.Random
) -> list[Block]:
    """The blocks of a longest path, where there are several of one by chance."""
    seconds, end = network.seconds, found.end

    def critical(number: int, begins: float) -> bool:
        start = end[number] - seconds[number]
        return abs(start - begins) < EPSILON and start + tail[number] > found.score - 2 * EPSILON

    place = [(0, 0)] * len(seconds)
    for rank, row in enumerate(rows):
        for at, number in enumerate(row):
            place[number] = rank, at
    number = chance.choice([row[0] for row in rows if row and critical(row[0], 0.0)])
    rank, at = place[number]
    blocks, first = [], at
    while True:
        row, other = rows[rank], network.receiver[number]
        ways = []
        if at + 1 < len(row) and critical(row[at + 1], end[number]):
            ways.append(row[at + 1])
        if other >= 0 and critical(other, end[number] + network.delay[other]):
            ways.append(other)
        number = chance.choice(ways) if ways else -1
        if number < 0 or place[number][0] != rank:
            blocks.append(Block(rank, first, at))
            if number < 0:
                return blocks
            first = place[number][1]
        rank, at = place[number]

"""What a rank computes: one pass of one micro-batch through one stage, written like ``2F0``."""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

from schedules.errors import UnreadableSchedule


class Kind(enum.StrEnum):
    """The kinds of pass. Zero-bubble papers call ``I`` "B" and have no letter for both at once."""

    F = "F"  # forward
    B = "B"  # full backward: I and W together
    I = "I"  # gradient of the input  # noqa: E741 - the field's own letter
    W = "W"  # gradient of the weights


class Action(NamedTuple):
    """One pass: ``str(Action(2, Kind.F, 0)) == "2F0"``, stage 2 forward on micro-batch 0."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @staticmethod
    def parse(text: str) -> Action:
        """Read ``2F0``. Raises UnreadableSchedule for anything else."""
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise UnreadableSchedule(
                f"{text!r} is not an action; write stage, kind (F, B, I or W) and micro-batch, such as '2F0'"
            )
        stage, kind, micro_batch = match.groups()
        return Action(int(stage), Kind(kind), int(micro_batch))


class Pair(NamedTuple):
    """Two actions that run as one: both inputs are awaited before it, both results are sent after it."""

    first: Action
    second: Action

    def __str__(self) -> str:
        return f"({self.first};{self.second})OVERLAP_F_B"


Entry = Action | Pair
"""What a row is made of."""


def parse_entry(text: str) -> Entry:
    """Read an action, or a pair in the form ``(2F0;3B1)OVERLAP_F_B``. Raises UnreadableSchedule."""
    match = _PAIR.fullmatch(text.strip())
    if match is None:
        return Action.parse(text)
    first, second = match.groups()
    return Pair(Action.parse(first), Action.parse(second))


def actions_of(entry: Entry) -> tuple[Action, ...]:
    """The one action of an Action, the two of a Pair."""
    return (entry,) if isinstance(entry, Action) else (entry.first, entry.second)


_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")

"""How kinds and causes look in every view: one table, in colours safe for colour-blind readers.

The colours are those of Okabe and Ito (2008). A full backward B is its two halves I and W run as one, so its orange
lies between their vermilion and yellow. Causes differ in pattern first: a bubble is readable in grey.
"""

from __future__ import annotations

from typing import NamedTuple


class KindLook(NamedTuple):
    """A kind of pass; ``colour`` is its fill, on which dark text is readable."""

    name: str
    words: str
    colour: str


class CauseLook(NamedTuple):
    """A cause of idle time: what it says, its colour (None: grey), hatch, and character in the terminal."""

    words: str
    colour: str | None
    hatch: str
    glyph: str
    ascii: str


KINDS = (
    KindLook("F", "forward", "#56B4E9"),
    KindLook("B", "backward", "#E69F00"),
    KindLook("I", "gradient of the input", "#D55E00"),
    KindLook("W", "gradient of the weights", "#F0E442"),
    KindLook("step", "optimizer step", "#009E73"),
)
"""In the order of ``schedules.table.KINDS``, and behind them what a rank does that is not a pass."""

STEP = len(KINDS) - 1

CAUSES = {
    "warm-up": CauseLook("before its first backward", None, "/", "╱", "/"),
    "drain": CauseLook("after its last forward", None, "\\", "╲", "\\"),
    "dependency": CauseLook("waits for passes that take no longer than its own", None, "x", "╳", "x"),
    "imbalance": CauseLook("waits for a slower stage", "#D55E00", "|", "│", "|"),
    "reduction": CauseLook("gradients are reduced", "#0072B2", "+", "┼", "+"),
    "link": CauseLook("a message is under way", "#CC79A7", "-", "╌", "~"),
    "host": CauseLook("everything is ready, and nothing has begun", None, ".", "·", "."),
}
"""The causes of idle time, each idle moment having exactly one."""

TRACKS = {"reduce": "#0072B2", "link": "#CC79A7"}
"""What goes on beside a rank's own work."""

LATER = "paler: the rank's later stages"

LATER_STAGES = 0.55
"""How far towards white the last of a rank's stages is; the first one has the full colour."""


def shade(kind: int, chunk: int, chunks: int) -> str:
    """The colour of a kind on a rank's ``chunk``-th of ``chunks`` stages, as ``#rrggbb``."""
    share = LATER_STAGES * chunk / (chunks - 1) if chunks > 1 else 0.0
    parts = [int(KINDS[kind].colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)

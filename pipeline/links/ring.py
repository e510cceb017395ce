"""Where messages lie in memory that holds several at once: handed out and given back in the same order."""

from __future__ import annotations

from collections import deque

__all__ = ["Ring"]

_LINE = 64  # bytes; no two messages share a cache line


class Ring:
    """Places in ``size`` bytes.  An empty ring starts at its beginning again, where memory is likely in a cache."""

    __slots__ = ("_held", "_taken", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._held: deque[tuple[int, int]] = deque()  # start and end of each message that is there, the oldest first
        self._taken = 0

    def place(self, nbytes: int, taken: int) -> int:
        """The offset of a message of ``nbytes``, or -1 when there is no room for it yet.

        ``taken`` counts the messages that the other side has taken since the start: their places are free.
        """
        held = self._held
        while self._taken < taken:
            self._taken += 1
            held.popleft()
        size = max(_LINE, -(-nbytes // _LINE) * _LINE)
        start, limit = 0, self.size
        if held:
            oldest, (newest, start) = held[0][0], held[-1]
            if newest < oldest:
                limit = oldest
            elif start + size > limit:
                start, limit = 0, oldest
        if start + size > limit:
            return -1
        held.append((start, start + size))
        return start

    def take_back(self) -> None:
        """Undo the last placement."""
        self._held.pop()

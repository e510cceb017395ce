"""The boards of several hosts kept alike: once a second one rank of each host tells the others what its host does."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence

from torch._C._distributed_c10d import Store

from pipeline.watch import Board, State

__all__ = ["Relay", "relay_between_hosts"]

_INTERVAL = 1.0


def relay_between_hosts(board: Board, ranks_by_host: Sequence[Sequence[int]], store: Store) -> Relay | None:
    """Start to relay, on the first rank of each host, if there is more than one host."""
    if len(ranks_by_host) < 2 or all(board.rank != ranks[0] for ranks in ranks_by_host):
        return None
    return Relay(board, ranks_by_host, store)


class Relay:
    """A thread that copies the host's part of the board to the store, and the others' parts to the board.

    Nothing else is written to the store, so that its cost does not depend on what the ranks do.  The store is a
    connection of its own: one that is shared would make its other users wait.
    """

    def __init__(
        self, board: Board, ranks_by_host: Sequence[Sequence[int]], store: Store, interval: float = _INTERVAL
    ) -> None:
        self._board = board
        self._own = next(tuple(ranks) for ranks in ranks_by_host if board.rank in ranks)
        self._others = [f"board-{ranks[0]}" for ranks in ranks_by_host if board.rank not in ranks]
        self._store = store.clone()  # type: ignore[attr-defined]
        self._interval = interval
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="board relay", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, which lets go of the store."""
        self._over.set()
        self._thread.join(timeout=5 * self._interval)

    def _run(self) -> None:
        try:
            while not self._over.wait(self._interval):
                self._exchange()
        except RuntimeError:  # the store has gone with the process that kept it, and so has the job
            return

    def _exchange(self) -> None:
        states = {rank: self._board.state(rank) for rank in self._own}
        self._store.set(f"board-{self._own[0]}", json.dumps(states))
        for key in self._others:
            if self._store.check([key]):
                for rank, state in json.loads(self._store.get(key)).items():
                    self._board.copy(int(rank), State(*state))

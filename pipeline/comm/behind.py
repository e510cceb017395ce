"""Exchanges of several collectives, run one after the other behind the computation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

import torch

from pipeline.device import uses_streams
from pipeline.links.protocol import DONE, Collective
from pipeline.switching import quick_switching

__all__ = ["AT_ONCE", "Behind", "behind"]

Work = Callable[[], None]


class Behind(Protocol):
    """Runs exchanges in the order in which they are started, the same on every rank."""

    def start(self, work: Work) -> Collective:
        """Run ``work`` behind the caller, whose tensors it has until the wait has returned."""


def behind(device: torch.device, *, threads: bool) -> Behind:
    """One for tensors on this device.  Ranks that are ``threads`` of one process exchange on a stream that all of them
    use, so that there nothing may go aside."""
    if uses_streams(device):
        return AT_ONCE if threads else _OnStream(device)
    return _InThread()


class _AtOnce:
    """What runs in the caller, since that is behind already."""

    def start(self, work: Work) -> Collective:
        work()
        return DONE


AT_ONCE: Behind = _AtOnce()


class _InThread:
    """A thread of its own for tensors in host memory; it is started with the first exchange."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Work, _Outcome]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, work: Work) -> Collective:
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._queue,), name="exchanges", daemon=True)
            self._thread.start()
        outcome = _Outcome()
        self._queue.put((work, outcome))
        return outcome

    def __del__(self) -> None:
        self._queue.put((_end, _Outcome()))


class _Outcome:
    """The wait for an exchange in a thread."""

    __slots__ = ("_done", "ended", "error")

    def __init__(self) -> None:
        self._done = threading.Event()
        self.error: BaseException | None = None
        self.ended: float | None = None

    def wait(self, timeout: float | None = None) -> None:
        # Each collective has the time-out of its transport, and ends the work with an error.
        self._done.wait(timeout)
        if self.error is not None:
            raise self.error

    def over(self, error: BaseException | None) -> None:
        self.error = error
        self.ended = time.perf_counter()
        self._done.set()


class _End(Exception):
    pass


def _end() -> None:
    raise _End


@quick_switching()
def _serve(queue: SimpleQueue[tuple[Work, _Outcome]]) -> None:
    while True:
        work, outcome = queue.get()
        try:
            with torch.no_grad():
                work()
        except _End:
            return
        except BaseException as error:  # the caller's, who raises it
            outcome.over(error)
        else:
            outcome.over(None)
        del work, outcome  # or they live, with their tensors, until the next exchange


class _OnStream:
    """A stream of its own on an accelerator.

    The host enqueues at once, so that collectives keep their place in the proved order of the program.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    @torch.no_grad()
    def start(self, work: Work) -> Collective:
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            work()
            return _Recorded(self._stream.record_event(), self._device)


class _Recorded:
    """The wait of a stream for what another was given to do."""

    __slots__ = ("_device", "_event")
    ended = None

    def __init__(self, event: torch.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def wait(self, timeout: float | None = None) -> None:
        torch.accelerator.current_stream(self._device).wait_event(self._event)

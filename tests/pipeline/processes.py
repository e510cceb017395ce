"""Run a function on several real processes under torch.distributed, with a time after which all of them die.

    def worker(text):                              # at the top level of a test module
        mesh = make_mesh()
        return f"{text} {mesh.rank}"

    run_processes(worker, 2, "hello")              # ["hello 0", "hello 1"]

The processes are forked from one that has imported torch already, so that a case takes a tenth of a
second.  They find what torchrun would tell them in their environment; the store they meet at belongs to the
calling process.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

__all__ = ["Outcome", "run_processes", "try_processes"]

_ROOT = str(Path(__file__).resolve().parents[2])
# torch imports its compiler when it makes the first optimizer, which takes seconds.
_PRELOAD = [
    "__main__",
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.device_mesh",
    "pipeline.engine",
]


@dataclass(frozen=True)
class Outcome:
    """What became of one rank: its result or its traceback, its exit code (-9: killed), and what it printed."""

    rank: int
    result: Any
    error: str | None
    exit_code: int | None
    output: str
    seconds: float


def run_processes(
    worker: Callable[..., Any],
    ranks: int,
    *args: Any,
    timeout: float = 60.0,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call ``worker(*args)`` on every rank, each a process; the results in rank order.

    Fails with the tracebacks and the output of all ranks when one raises, dies, or does not end in time.
    """
    outcomes = try_processes(worker, ranks, *args, timeout=timeout, environment=environment)
    if any(outcome.error is not None or outcome.exit_code != 0 for outcome in outcomes):
        raise AssertionError("\n".join(_story(outcome) for outcome in outcomes))
    return [outcome.result for outcome in outcomes]


def try_processes(
    worker: Callable[..., Any],
    ranks: int,
    *args: Any,
    timeout: float = 60.0,
    environment: Mapping[str, str] | None = None,
) -> list[Outcome]:
    """Call ``worker(*args)`` on every rank, each a process; what became of each, in rank order.

    After ``timeout`` seconds whatever still runs is killed, with the processes that it has started.
    """
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout))
    shared = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        **(environment or {}),
    }
    with tempfile.TemporaryDirectory(prefix="pipeloom-test-") as folder:
        running = [_Rank(rank, worker, args, shared, Path(folder)) for rank in range(ranks)]
        try:
            return _collect(running, time.monotonic() + timeout)
        finally:
            for rank in running:
                rank.kill()


def _story(outcome: Outcome) -> str:
    end = "was killed after" if outcome.exit_code == -signal.SIGKILL else f"ended with code {outcome.exit_code} after"
    lines = [f"--- rank {outcome.rank} {end} {outcome.seconds:.1f} s"]
    lines += [text.rstrip() for text in (outcome.output, outcome.error or "") if text.strip()]
    return "\n".join(lines)


class _Rank:
    """One running process."""

    def __init__(
        self, rank: int, worker: Callable[..., Any], args: Sequence[Any], shared: Mapping[str, str], folder: Path
    ) -> None:
        self.rank = rank
        self.output = folder / str(rank)
        self.result: tuple[Any, str | None] = (None, None)
        self.connection, child = multiprocessing.Pipe(duplex=False)
        environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        self.started = time.monotonic()
        self.process: BaseProcess = _context().Process(
            target=_child, args=(child, environment, str(self.output), worker, args), name=f"rank {rank}", daemon=True
        )
        self.process.start()
        child.close()

    def receive(self) -> None:
        with suppress(EOFError):  # it died before it could say why
            self.result = pickle.loads(self.connection.recv_bytes())

    def outcome(self) -> Outcome:
        result, error = self.result
        seconds = time.monotonic() - self.started
        output = self.output.read_text(errors="replace") if self.output.exists() else ""
        return Outcome(self.rank, result, error, self.process.exitcode, output, seconds)

    def kill(self) -> None:
        if self.process.pid is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.connection.close()


def _collect(running: Sequence[_Rank], deadline: float) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    by_sentinel = {rank.process.sentinel: rank for rank in running}
    by_connection: dict[Connection, _Rank] = {rank.connection: rank for rank in running}
    while by_sentinel:
        left = deadline - time.monotonic()
        ready = wait([*by_connection, *by_sentinel], timeout=max(left, 0.0))
        for connection in [c for c in by_connection if c in ready]:
            by_connection.pop(connection).receive()
        for sentinel in [s for s in by_sentinel if s in ready]:
            rank = by_sentinel.pop(sentinel)
            rank.process.join()
            outcomes[rank.rank] = rank.outcome()
        if left <= 0 and not ready:
            break
    for rank in by_sentinel.values():
        rank.kill()
        outcomes[rank.rank] = rank.outcome()
    return [outcomes[rank.rank] for rank in running]


def _context() -> ForkServerContext:
    """Where processes are forked from: a server process that has imported torch, and has used none of it."""
    context = cast(ForkServerContext, multiprocessing.get_context("forkserver"))
    context.set_forkserver_preload(_PRELOAD)
    return context


def _child(
    connection: Connection, environment: Mapping[str, str], output: str, worker: Callable[..., Any], args: Sequence[Any]
) -> None:
    os.setsid()  # the head of a group, so that it is killed with all that it starts
    file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)
    try:
        result, error = worker(*args), None
    except BaseException:
        result, error = None, traceback.format_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        # By value: multiprocessing itself would leave tensors in memory that goes with the process.
        connection.send_bytes(pickle.dumps((result, error)))
    except Exception:  # a result that cannot be pickled
        connection.send_bytes(pickle.dumps((None, traceback.format_exc())))
    connection.close()
    _leave()
    if error is not None:
        sys.exit(1)


def _leave() -> None:
    """End as a process does that runs a script: multiprocessing skips what is registered with atexit."""
    import atexit

    atexit._run_exitfuncs()

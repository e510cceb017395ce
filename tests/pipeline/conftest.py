"""What tests of the engine share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.links.local import LocalLink, run_local
from pipeline.links.shared_link import is_possible
from tests.pipeline import own_clock
from tests.pipeline.orders import declare
from tests.pipeline.processes import run_processes
from tests.pipeline.transports import LINK

Sent = list[tuple[int, torch.dtype]]


@pytest.fixture
def double_precision(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything in float64, and the schedules of the tests known by name."""
    declare(monkeypatch)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """``time.perf_counter`` tells each thread what tests let it spend, and nothing beside."""
    monkeypatch.setattr(time, "perf_counter", own_clock.now)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """Lane and type of every tensor that any rank of this process sends, from here on."""
    seen: Sent = []
    send = LocalLink.send

    def noting(link: LocalLink, peer: int, tensor: Tensor, lane: int) -> Any:
        seen.append((lane, tensor.dtype))
        return send(link, peer, tensor, lane)

    monkeypatch.setattr(LocalLink, "send", noting)
    return seen


@pytest.fixture(params=["threads", "processes", "processes that share memory"])
def run(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """Calls a worker on ranks, by each kind of link."""
    if request.param == "threads":
        return run_local
    link = "shm" if "share" in request.param else "gloo"
    if link == "shm" and not is_possible():
        pytest.skip("no link through shared memory on this kind of machine")
    return partial(run_processes, environment={LINK: link})

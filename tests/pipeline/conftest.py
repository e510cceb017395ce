"""What tests of the engine share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.pipeline.orders import declare


@pytest.fixture
def double_precision(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything in float64, and the schedules of the tests known by name."""
    declare(monkeypatch)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)

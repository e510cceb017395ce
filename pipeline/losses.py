"""Losses that a layer adds beside the main one."""

from __future__ import annotations

import threading

from torch import Tensor

from pipeline.errors import ModelError

__all__ = ["add_loss", "collect_losses"]


class _Active(threading.local):
    losses: list[tuple[str, Tensor]] | None = None


_active = _Active()


def add_loss(name: str, value: Tensor) -> None:
    """Add an auxiliary loss from inside a layer's ``forward``, such as a balance term of a mixture of experts.

    ``value`` is a scalar, the mean over the micro-batch.  Its gradient enters at this layer with the weight of the
    micro-batch in the step, exactly as the main loss's does; it is counted once when the layer is recomputed; and
    ``engine.losses()[name]`` reports its weighted mean over the step.  Outside of an engine it does nothing, so that
    a layer can be tried alone.

    Raises ``ModelError`` when the value is not a scalar tensor.
    """
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ModelError(f"add_loss({name!r}, ...) takes a scalar tensor, the mean over the micro-batch; got {shape}")
    if _active.losses is not None:
        _active.losses.append((name, value.reshape(())))


def collect_losses(into: list[tuple[str, Tensor]] | None) -> list[tuple[str, Tensor]] | None:
    """From now on this thread's ``add_loss`` calls are appended to ``into``; returns where they went before."""
    outer = _active.losses
    _active.losses = into
    return outer

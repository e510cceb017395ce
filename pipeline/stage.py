"""A stage: consecutive layers of the list on one rank, run for one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipeline.errors import LossError
from pipeline.layer import Gradients, Layer, LayerCall, Place
from pipeline.shapes import Value, flatten, unflatten

if TYPE_CHECKING:
    from pipeline.zero.stage import StageShards

__all__ = ["Stage", "StagePass", "with_targets"]


class StagePass:
    """One micro-batch's passage through a stage: a call for each layer, newest last, and the losses added."""

    __slots__ = ("calls", "current", "losses", "needs_gradient")

    def __init__(self) -> None:
        self.calls: list[LayerCall] = []
        self.losses: list[tuple[str, Tensor]] = []
        self.current: Layer | None = None  # the layer at work, for the message when it raises; None when none is
        self.needs_gradient: tuple[bool, ...] = ()  # which leaves of the stage's output need one


class Stage:
    """Layers ``[first, first + len(layers))`` of the list.

    ``loss`` is the loss as one more layer, on the last stage of a route, else None.  ``shards`` is what the stage
    shares with the same stage of other pipelines, None where there is only one, ``parts`` the same as far as passes
    have to ask it for what ranks hold in parts.
    """

    def __init__(
        self, number: int, layers: Sequence[Layer], loss: Layer | None, shards: StageShards | None = None
    ) -> None:
        self.number = number
        self.layers = tuple(layers)
        self.loss = loss
        self.shards = shards
        self.parts = shards if shards is not None and shards.in_parts else None

    def train(self, mode: bool) -> None:
        for layer in self.layers:
            if layer.module is not None:
                layer.module.train(mode)

    def forward(self, value: Value, place: Place, passage: StagePass, targets: Any = None) -> tuple[Value, Value]:
        """Run the layers; returns what the last layer gave, and what to hand on: the same, or the loss."""
        for layer in self.layers if self.parts is None else self.parts.forward():
            passage.current = layer
            value, call = layer.forward(value, place)
            passage.calls.append(call)
            if call.losses:
                passage.losses += [(name, loss.detach()) for name, loss in call.losses]
        result = value
        if self.loss is not None:
            passage.current = self.loss
            loss, call = self.loss.forward(with_targets(value, targets), place)
            passage.calls.append(call)
            passage.losses += [(name, added.detach()) for name, added in call.losses]
            result = _scalar(loss)
        passage.current = None
        return value, result

    def infer(
        self, value: Value, place: Place, passage: StagePass, targets: Any, with_loss: bool
    ) -> tuple[Value, Value]:
        """As ``forward``, without gradients; the loss only where it is asked for."""
        for layer in self.layers if self.parts is None else self.parts.forward():
            passage.current = layer
            value, losses = layer.infer(value, place)
            passage.losses += losses
        result = value
        if self.loss is not None and with_loss:
            passage.current = self.loss
            loss, losses = self.loss.infer(with_targets(value, targets), place)
            passage.losses += losses
            result = _scalar(loss)
        passage.current = None
        return value, result

    def backward(self, passage: StagePass, gradients: Gradients, loss_scale: float, *, defer: bool) -> Gradients:
        """Gradients of the stage's input leaves that need one; with ``defer`` the weights' products wait.

        On the last stage of a route the gradient starts at the loss, with the micro-batch's share of the step.  Where
        that is 0 none does: the mean over no samples is not a number, and has no part in the step.
        """
        layers = reversed(self.layers) if self.parts is None else self.parts.backward(defer=defer)
        if self.loss is not None:
            gradients = [torch.full_like(x, loss_scale) if loss_scale else None for x in passage.calls[-1].outputs]
        for layer, call in zip(self._behind_loss(layers), reversed(passage.calls), strict=True):
            passage.current = layer
            gradients = layer.backward(call, gradients, loss_scale, defer=defer)
        passage.current = None
        return gradients

    def weight_gradients(self, *passages: StagePass) -> None:
        """The products that a deferred backward left, from the last layer to the first; of several in one."""
        if not passages:
            return
        first, layers = passages[0], reversed(self.layers) if self.parts is None else self.parts.weights()
        for layer, *calls in zip(self._behind_loss(layers), *(reversed(p.calls) for p in passages), strict=True):
            first.current = layer
            layer.weight_gradients(*calls)
        first.current = None

    def _behind_loss(self, layers: Iterator[Layer]) -> Iterable[Layer]:
        """The layers of a backward: the loss first, where this stage has it."""
        return layers if self.loss is None else chain((self.loss,), layers)


def with_targets(output: Value, targets: Any) -> Value:
    """The pair that the loss takes, as one value; gradients flow to the output only."""
    leaves, structure = flatten((unflatten(output.leaves, output.structure), targets))
    needs = output.needs_gradient + (False,) * (len(leaves) - len(output.leaves))
    return Value(leaves, structure, needs)


def _scalar(loss: Value) -> Value:
    (leaf, *rest) = loss.leaves
    if rest or not isinstance(leaf, Tensor) or leaf.numel() != 1 or leaf.is_complex():
        kind = "complex tensor" if isinstance(leaf, Tensor) and leaf.is_complex() else "tensor"
        shown = f"a {kind} of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__
        raise LossError(f"loss_fn must return a scalar tensor, the mean over the micro-batch; it returned {shown}")
    return loss

"""Runs a module over micro-batches plainly, with W inline and with W deferred, and compares the gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipeline.gradients import FlatLayer, WeightGradQueue, split


class Gradients(NamedTuple):
    """Of the parameters, summed over the micro-batches, and of the input of each micro-batch."""

    parameters: dict[str, Tensor]
    inputs: list[Tensor | None]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def plainly(module: nn.Module, batches: list[Tensor], *, input_grad: bool = True, autocast: bool = False) -> Gradients:
    """What autograd alone computes."""
    inputs = []
    for number, batch in enumerate(batches):
        x = _input(batch, input_grad)
        with torch.autocast("cpu", enabled=autocast):
            output = module(x)
        if output.requires_grad:
            output.backward(_direction(output, number))
        inputs.append(x.grad)
    return Gradients(
        {
            name: torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
            for name, p in module.named_parameters()
            if p.requires_grad
        },
        inputs,
    )


def splitting(
    module: nn.Module,
    batches: list[Tensor],
    *,
    inline: bool,
    input_grad: bool = True,
    autocast: bool = False,
    reference_numerics: bool = False,
    prepare: Callable[[nn.Module], object] | None = None,
) -> Gradients:
    """What the split gives: all forwards first, then a B each, or all I and then all W."""
    flat = FlatLayer(module)
    binding = split(module, flat, reference_numerics=reference_numerics)
    if prepare is not None:
        prepare(module)
    flat.zero_gradients()
    passes = []
    for batch in batches:
        x, queue = _input(batch, input_grad), WeightGradQueue()
        with binding.forward(queue), torch.autocast("cpu", enabled=autocast):
            output = module(x)
        passes.append((x, queue, output))
    for number, (_, queue, output) in enumerate(passes):
        with binding.backward(queue, inline=inline) if output.requires_grad else nullcontext():
            if output.requires_grad:
                output.backward(_direction(output, number))
        assert not inline or len(queue) == 0
    for _, queue, _ in passes:
        queue.drain()
    flat.check_gradients()
    return Gradients({name: value.clone() for name, value in flat.gradients().items()}, [x.grad for x, _, _ in passes])


def check(
    module: nn.Module,
    batches: list[Tensor],
    *,
    tolerance: float = 1e-12,
    input_grad: bool = True,
    autocast: bool = False,
) -> None:
    """Inline and deferred give the same bits, and autograd's gradients to the tolerance (of the largest one)."""
    plain = plainly(copy.deepcopy(module), batches, input_grad=input_grad, autocast=autocast)
    inline, deferred = (
        splitting(copy.deepcopy(module), batches, inline=inline, input_grad=input_grad, autocast=autocast)
        for inline in (True, False)
    )
    assert inline.parameters.keys() == plain.parameters.keys()
    largest = max((float(value.abs().max()) for value in plain.parameters.values()), default=0.0)
    for name, expected in plain.parameters.items():
        assert torch.equal(inline.parameters[name], deferred.parameters[name]), name
        assert float((inline.parameters[name] - expected).abs().max()) <= tolerance * largest, name
    for mine, later, expected in zip(inline.inputs, deferred.inputs, plain.inputs, strict=True):
        assert (mine is None) == (later is None) == (expected is None)
        if mine is not None and later is not None and expected is not None:
            assert torch.equal(mine, later)
            assert float((mine - expected).abs().max()) <= tolerance * float(expected.abs().max())


def waiting(module: nn.Module, batch: Tensor) -> int:
    """How many weight gradients wait after I of the second of two micro-batches."""
    flat = FlatLayer(module)
    binding = split(module, flat)
    for _ in range(2):
        queue = WeightGradQueue()
        with binding.forward(queue):
            output = module(_input(batch, True))
        with binding.backward(queue, inline=False):
            output.backward(torch.ones_like(output))
    return len(queue)


def _input(batch: Tensor, needs_grad: bool) -> Tensor:
    x = batch.clone().requires_grad_(needs_grad and batch.is_floating_point())
    # As in the engine: no leaf, so that a layer may change it in place.
    return _keep(x) if x.requires_grad else x


def _keep(x: Tensor) -> Tensor:
    y = x.view_as(x)
    y.retain_grad()
    return y


def _direction(output: Tensor, number: int) -> Tensor:
    values = torch.linspace(-1, 2, output.numel(), dtype=torch.float64) + number
    return values.view(output.shape).to(output.dtype)

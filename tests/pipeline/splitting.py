"""Runs a module over micro-batches plainly, with W inline and with W deferred, and compares the gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipeline.gradients import FlatLayer, WeightGradQueue, split
from pipeline.layer import Layer, Place, RandomSource
from pipeline.shapes import Value, flatten


class Gradients(NamedTuple):
    """Of the parameters, summed over the micro-batches, and of the input of each micro-batch; the types of outputs."""

    parameters: dict[str, Tensor]
    inputs: list[Tensor | None]
    outputs: list[torch.dtype]


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
    inputs, outputs = [], []
    for number, batch in enumerate(batches):
        leaf, x = _input(batch, input_grad)
        with torch.autocast("cpu", enabled=autocast):
            output = module(x)
        if output.requires_grad:
            output.backward(_direction(output, number))
        inputs.append(leaf.grad)
        outputs.append(output.dtype)
    return Gradients(
        {
            name: torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
            for name, p in module.named_parameters()
            if p.requires_grad
        },
        inputs,
        outputs,
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
        (leaf, x), queue = _input(batch, input_grad), WeightGradQueue()
        with binding.forward(queue), torch.autocast("cpu", enabled=autocast):
            output = module(x)
        passes.append((leaf, queue, output))
    for number, (_, queue, output) in enumerate(passes):
        with binding.backward(queue, inline=inline) if output.requires_grad else nullcontext():
            if output.requires_grad:
                output.backward(_direction(output, number))
        assert not inline or len(queue) == 0
    for _, queue, _ in passes:
        queue.drain()
    flat.check_gradients()
    return Gradients(
        {name: value.clone() for name, value in flat.gradients().items()},
        [leaf.grad for leaf, _, _ in passes],
        [output.dtype for _, _, output in passes],
    )


def recomputing(
    module: nn.Module, batches: list[Tensor], *, inline: bool, input_grad: bool = True, autocast: bool = False
) -> Gradients:
    """The same by a layer of the engine that keeps its input alone, and runs forward again in its B or I."""

    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=autocast):
            y: Tensor = module(x)
            return y

    flat = FlatLayer(module)
    binding, random = split(module, flat), RandomSource(0, torch.device("cpu"), None)
    layer = Layer(0, "layer", forward, random, module=module, flat=flat, binding=binding, recompute=True)
    flat.zero_gradients()
    passes = []
    for number, batch in enumerate(batches):
        entering = Value(*flatten(batch), (input_grad and batch.is_floating_point(),))
        passes.append(layer.forward(entering, Place.at(0, 0, number)))
    inputs = []
    for number, (output, call) in enumerate(passes):
        needs = zip(output.leaves, output.needs_gradient, strict=True)
        directions = [_direction(leaf, number) for leaf, need in needs if need]
        inputs.append(next(iter(layer.backward(call, directions, 1.0, defer=not inline)), None))
        assert not inline or len(call.queue) == 0
    for _, call in passes:
        call.queue.drain()
    flat.check_gradients()
    outputs = [output.leaves[0].dtype for output, _ in passes]
    return Gradients({name: value.clone() for name, value in flat.gradients().items()}, inputs, outputs)


def check(
    module: nn.Module,
    batches: list[Tensor],
    *,
    tolerance: float = 1e-12,
    input_grad: bool = True,
    autocast: bool = False,
    recompute: bool = False,
) -> None:
    """Inline and deferred give the same bits, and autograd's gradients to the tolerance (of the largest one)."""
    plain = plainly(copy.deepcopy(module), batches, input_grad=input_grad, autocast=autocast)
    run = recomputing if recompute else splitting
    inline, deferred = (
        run(copy.deepcopy(module), batches, inline=inline, input_grad=input_grad, autocast=autocast)
        for inline in (True, False)
    )
    assert inline.parameters.keys() == plain.parameters.keys()
    assert inline.outputs == deferred.outputs == plain.outputs
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
            output = module(_input(batch, True)[1])
        with binding.backward(queue, inline=False):
            output.backward(torch.ones_like(output))
    return len(queue)


def _input(batch: Tensor, needs_grad: bool) -> tuple[Tensor, Tensor]:
    """Where the gradient will be, and what the module gets: as in the engine no leaf, so that it may change it.

    Not a gradient retained in what the module gets, to which one that the module asks for itself would be added.
    """
    leaf = batch.clone().requires_grad_(needs_grad and batch.is_floating_point())
    return leaf, leaf.clone()


def _direction(output: Tensor, number: int) -> Tensor:
    values = torch.linspace(-1, 2, output.numel(), dtype=torch.float64) + number
    return values.view(output.shape).to(output.dtype)

"""Rebinds the modules of a layer, one by one, to operators whose backward splits into I and W."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from pipeline.gradients.convolution import Geometry, convolution
from pipeline.gradients.embedding import embedding
from pipeline.gradients.flat import FlatLayer
from pipeline.gradients.linear import linear
from pipeline.gradients.queue import WeightGradQueue
from pipeline.gradients.scratch import Scratch
from pipeline.gradients.site import Site


class Binding:
    """A layer whose operators split. Set `queue` to the micro-batch's before its forward; None: nothing is split."""

    __slots__ = ("_bound", "flat", "queue")

    def __init__(self, flat: FlatLayer) -> None:
        self.flat = flat
        self.queue: WeightGradQueue | None = None
        self._bound: list[nn.Module] = []

    def unsplit(self) -> None:
        """Give every module its own forward back."""
        for module in self._bound:
            del module.__dict__["forward"]
        self._bound.clear()


def split(module: nn.Module, flat: FlatLayer, *, scratch: Scratch | None = None) -> Binding:
    """Rebind the linear, embedding and convolution modules of a layer, by instance: classes stay as they are.

    `flat` holds the module's parameters; `scratch` is memory that the layers of a rank share. A module pickles, copies
    and saves as before (a copy has the plain forward); what is not recognised keeps its ordinary backward.
    """
    binding = Binding(flat)
    scratch = scratch or Scratch()
    for child in module.modules():
        run = _OPERATORS.get(type(child).forward)
        weight = child._parameters.get("weight")
        if run is None or weight is None or "forward" in child.__dict__:
            continue
        if flat.gradient_of(weight) is None or weight.is_complex():
            continue
        site = Site(weight, child._parameters.get("bias"), flat, scratch)
        child.__dict__["forward"] = _Rebound(run, child, binding, site)
        binding._bound.append(child)
    return binding


class _Rebound:
    """The forward of one module instance; pickled or copied, it becomes the plain method again."""

    __slots__ = ("binding", "module", "run", "site")

    def __init__(self, run: _Run, module: nn.Module, binding: Binding, site: Site) -> None:
        self.run = run
        self.module = module
        self.binding = binding
        self.site = site

    def __call__(self, x: Tensor) -> Tensor:
        queue = self.binding.queue
        module = self.module
        if queue is not None and module._parameters["weight"] is self.site.weight:
            result = self.run(module, x, self.site, queue)
            if result is not None:
                return result
        plain: Tensor = type(module).forward(module, x)
        return plain

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (type(self.module).forward, self.module)


def _linear(module: Any, x: Tensor, site: Site, queue: WeightGradQueue) -> Tensor | None:
    operand = site.operand(x)
    return None if operand is None else linear(operand, site.weight, module.bias, site, queue)


def _embedding(module: Any, indices: Tensor, site: Site, queue: WeightGradQueue) -> Tensor | None:
    unusual = module.sparse or module.scale_grad_by_freq or module.max_norm is not None
    if unusual or not site.accepts(indices):
        return None
    padding_idx = -1 if module.padding_idx is None else module.padding_idx
    return embedding(indices, site.weight, padding_idx, site, queue)


def _convolution(module: Any, x: Tensor, site: Site, queue: WeightGradQueue) -> Tensor | None:
    dimensions = len(module.kernel_size)
    operand = site.operand(x)
    if operand is None or operand.dim() not in (dimensions + 1, dimensions + 2):
        return None
    batched = operand.dim() == dimensions + 2
    operand, padding = _pad(module, operand if batched else operand.unsqueeze(0))
    geometry = Geometry(module.stride, padding, module.dilation, module.groups)
    result = convolution(operand, site.weight, module.bias, geometry, site, queue)
    return result if batched else result.squeeze(0)


def _pad(module: Any, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The input with all padding that the convolution itself cannot do, and the padding that it can."""
    both = module._reversed_padding_repeated_twice  # (left, right) a dimension, the last dimension first
    if module.padding == "valid":
        return x, (0,) * len(module.kernel_size)
    if module.padding_mode != "zeros":
        return functional.pad(x, both, mode=module.padding_mode), (0,) * len(module.kernel_size)
    left, right = both[0::2][::-1], both[1::2][::-1]
    if left == right:
        return x, tuple(left)
    return functional.pad(x, both), (0,) * len(module.kernel_size)


_Run = Callable[[Any, Tensor, Site, WeightGradQueue], Tensor | None]

_OPERATORS: dict[Callable[..., Tensor], _Run] = {
    nn.Linear.forward: _linear,
    nn.Embedding.forward: _embedding,
    nn.Conv1d.forward: _convolution,
    nn.Conv2d.forward: _convolution,
    nn.Conv3d.forward: _convolution,
}

"""Rebinds the modules of a layer, one by one, to operators whose backward splits into I and W."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from pipeline.gradients.binding import Binding
from pipeline.gradients.calls import (
    split_convolution,
    split_embedding,
    split_linear,
    under_autocast,
    under_transform,
)
from pipeline.gradients.flat import FlatLayer
from pipeline.gradients.functional import FunctionalWatch
from pipeline.gradients.linear import LINEAR, linear
from pipeline.gradients.scratch import Scratch
from pipeline.gradients.site import Site


def split(
    module: nn.Module, flat: FlatLayer, *, scratch: Scratch | None = None, reference_numerics: bool = False
) -> Binding:
    """Rebind the linear, embedding and convolution modules of a layer, by instance: classes stay as they are.

    `flat` holds the module's parameters, whose values stay where they are from here on; `scratch` is memory that the
    layers of a rank share. With `reference_numerics` gradients are accumulated exactly as autograd does it, which takes
    a temporary per product. A split module pickles, copies and saves as before (a copy has the plain forward); what is
    not recognised keeps its ordinary backward, and so does what torch.compile compiles.
    """
    binding = Binding(flat, scratch or Scratch(), reference=reference_numerics)
    compiled = _compiled(module)
    for child in module.modules():
        if child in compiled:
            continue
        rebind = _FORWARDS.get(type(child).forward)
        weight = child._parameters.get("weight")
        if rebind is None or weight is None or "forward" in child.__dict__ or flat.gradient_of(weight) is None:
            continue
        forward = rebind(child, binding)
        if forward is not None:
            child.__dict__["forward"] = forward
            binding.rebound.append(child)
    opaque = {parameter for child in compiled for parameter in child.parameters(recurse=False)}
    binding.watch = FunctionalWatch(binding, opaque)
    return binding


def unsplit(binding: Binding) -> None:
    """Give every module that `split` has rebound its own forward back."""
    for module in binding.rebound:
        del module.__dict__["forward"]
    binding.rebound.clear()
    binding.watch = None


def _compiled(module: nn.Module) -> set[nn.Module]:
    """Modules whose code torch.compile takes apart: it must meet the operators that it knows."""
    roots = [m for m in module.modules() if m._compiled_call_impl is not None or "_orig_mod" in m._modules]
    return {child for root in roots for child in root.modules()}


class _LinearForward:
    """The forward of one nn.Linear: what `split_linear` does, with the site at hand, since it runs most often."""

    __slots__ = ("bias", "binding", "dtype", "module", "parameters", "site", "weight")

    def __init__(self, module: nn.Module, binding: Binding, weight: Tensor, site: Site) -> None:
        self.module = module
        self.binding = binding
        self.parameters = module._parameters
        self.weight = weight
        self.bias = module._parameters["bias"]
        self.dtype = weight.dtype
        self.site = site

    def __call__(self, x: Tensor) -> Tensor:
        weight = self.parameters["weight"]
        bias = self.parameters["bias"]
        if (
            self.binding.current is None
            or weight is not self.weight
            or bias is not self.bias
            or type(x) is not Tensor
            or x.dtype is not self.dtype
            or under_autocast()
            or under_transform()
        ):
            return self._unusual(x, self.module)
        return linear(x, self.weight, bias, self.site)

    def _unusual(self, x: Tensor, module: Any) -> Tensor:
        result = split_linear(self.binding, x, module.weight, module.bias)
        return functional.linear(x, module.weight, module.bias) if result is None else result

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (type(self.module).forward, self.module)


def _rebind_linear(module: nn.Module, binding: Binding) -> _LinearForward | None:
    weight = module._parameters["weight"]
    site = None if weight is None else binding.site(LINEAR, weight, module._parameters["bias"])
    return None if weight is None or site is None else _LinearForward(module, binding, weight, site)


class _Forward:
    """The forward of one module instance; pickled or copied, it becomes the plain method again."""

    __slots__ = ("binding", "call", "module")

    def __init__(
        self, call: Callable[[Any, Binding, Tensor], Tensor | None], module: nn.Module, binding: Binding
    ) -> None:
        self.call = call
        self.module = module
        self.binding = binding

    def __call__(self, x: Tensor) -> Tensor:
        result = self.call(self.module, self.binding, x)
        if result is not None:
            return result
        plain: Tensor = type(self.module).forward(self.module, x)
        return plain

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (type(self.module).forward, self.module)


def _embedding(module: Any, binding: Binding, indices: Tensor) -> Tensor | None:
    if module.sparse or module.scale_grad_by_freq or module.max_norm is not None:
        return None
    return split_embedding(binding, indices, module.weight, module.padding_idx)


def _convolution(module: Any, binding: Binding, x: Tensor) -> Tensor | None:
    padding = module.padding
    if module.padding_mode != "zeros":
        if binding.current is None:
            return None
        x = functional.pad(x, module._reversed_padding_repeated_twice, mode=module.padding_mode)
        padding = 0
    return split_convolution(
        binding, x, module.weight, module.bias, module.stride, padding, module.dilation, module.groups
    )


_FORWARDS: dict[Callable[..., Tensor], Callable[[nn.Module, Binding], Callable[[Tensor], Tensor] | None]] = {
    nn.Linear.forward: _rebind_linear,
    nn.Embedding.forward: partial(_Forward, _embedding),
    nn.Conv1d.forward: partial(_Forward, _convolution),
    nn.Conv2d.forward: partial(_Forward, _convolution),
    nn.Conv3d.forward: partial(_Forward, _convolution),
}

"""Functional operators that user code calls on weights: `F.linear(x, w)`, `x @ w.t()`, `torch.einsum(..., x, w)`.

A TorchFunctionMode would see every operator of a layer, at the cost of a Python call each. Instead, while
user code runs, the weights of interest wear a class of their own, so that Python is entered only by
operators that take one of them or a view of one. In a layer's first micro-batch these are all its weights;
later, those that a functional operator has used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.gradients.binding import Binding
from pipeline.gradients.calls import plus, split_convolution, split_embedding, split_linear
from pipeline.gradients.einsum import split_einsum


class FunctionalWatch:
    """Makes the weights of a layer known to functional operators from `start` to `stop`."""

    __slots__ = ("_learning", "_parameter_class", "_used", "_view_class", "_watched", "binding")

    def __init__(self, binding: Binding, opaque: Set[nn.Parameter]) -> None:
        """`opaque`: weights that must stay as they are, since compiled code takes them."""
        self.binding = binding
        self._parameter_class = type("Parameter", (nn.Parameter,), {"__torch_function__": self._dispatch})
        self._view_class = type("Tensor", (Tensor,), {"__torch_function__": self._dispatch})
        weights = binding.flat.trainable().items()
        self._watched = {n: p for n, p in weights if p.dim() >= 2 and type(p) is nn.Parameter and p not in opaque}
        self._used: set[str] = set()
        self._learning = True

    def start(self) -> None:
        """User code may run from here."""
        for parameter in self._watched.values():
            parameter.__class__ = self._parameter_class

    def stop(self, *, backward: bool) -> None:
        """User code has run; the first backward, which may recompute, ends the first micro-batch."""
        for parameter in self._watched.values():
            parameter.__class__ = nn.Parameter
        if backward and self._learning:
            self._learning = False
            self._watched = {name: self._watched[name] for name in self._used}
            if not self._watched:
                self.binding.watch = None

    def _dispatch(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """The `__torch_function__` of the two classes."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            split = _SPLIT.get(function)
            if split is not None and torch.is_grad_enabled() and kwargs.keys() <= _KEYWORDS[function]:
                result = split(self.binding, *args, **kwargs)
                if result is not None:
                    if self._learning:
                        self._used.update(self._names(args, kwargs))
                    return result
            result = function(*args, **kwargs)
            self._follow(function, args, kwargs, result)
            return result

    def _follow(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Make views of weights known too, and remember operators that could not be split."""
        for part in result if isinstance(result, tuple | list) else (result,):
            if type(part) is not Tensor or not part.requires_grad:
                continue
            if isinstance(part._base, nn.Parameter):
                part.__class__ = self._view_class
            elif self._learning:
                for name in self._names(args, kwargs):
                    self.binding.unrecognised.setdefault(name, set()).add(getattr(function, "__name__", str(function)))

    def _names(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
        """The weights among the arguments of a call, themselves or as views."""
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        found = {id(t) for t in tensors} | {id(t._base) for t in tensors if t._base is not None}
        return [name for name, parameter in self._watched.items() if id(parameter) in found]


def _matmul(binding: Binding, input: Tensor, other: Tensor) -> Tensor | None:
    if _is_weight(other):
        return None if _is_weight(input) or other.dim() != 2 else split_linear(binding, input, other.t())
    if input.dim() != 2:
        return None
    if other.dim() == 1:
        return split_linear(binding, other, input)
    result = split_linear(binding, other.transpose(-1, -2), input)
    return None if result is None else result.transpose(-1, -2)


def _reflected_matmul(binding: Binding, input: Tensor, other: Tensor) -> Tensor | None:
    return _matmul(binding, other, input)


def _addmm(
    binding: Binding, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor | None:
    if beta != 1 or alpha != 1 or not _is_weight(mat2) or _is_weight(mat1):
        return None
    if input.dim() == 1:
        return split_linear(binding, mat1, mat2.t(), input)
    product = split_linear(binding, mat1, mat2.t())
    return None if product is None else plus(product, input)


def _linear(binding: Binding, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    return split_linear(binding, input, weight, bias)


def _embedding(
    binding: Binding,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    if max_norm is not None or scale_grad_by_freq or sparse:
        return None
    return split_embedding(binding, input, weight, padding_idx)


def _convolution(binding: Binding, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
    return split_convolution(binding, input, weight, *args, **kwargs)


def _einsum(binding: Binding, equation: str, *operands: Any) -> Tensor | None:
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    return split_einsum(binding, equation, *operands) if isinstance(equation, str) else None


def _is_weight(operand: Tensor) -> bool:
    return isinstance(operand, nn.Parameter) or isinstance(operand._base, nn.Parameter)


_SPLIT: dict[Callable[..., Any], Callable[..., Tensor | None]] = {
    functional.linear: _linear,
    functional.embedding: _embedding,
    functional.conv1d: _convolution,
    functional.conv2d: _convolution,
    functional.conv3d: _convolution,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    Tensor.matmul: _matmul,
    Tensor.mm: _matmul,
    Tensor.__matmul__: _matmul,
    Tensor.__rmatmul__: _reflected_matmul,
    torch.addmm: _addmm,
    Tensor.addmm: _addmm,
    torch.einsum: _einsum,
}

_KEYWORDS = {
    function: frozenset(
        {"bias", "stride", "padding", "dilation", "groups", "input", "weight"}
        if split is _convolution
        else inspect.signature(split).parameters
    )
    for function, split in _SPLIT.items()
}
"""Keywords that a split form knows; a call with another one, such as out=, runs as it is."""

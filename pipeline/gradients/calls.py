"""Calls of PyTorch's operators, taken over by their split forms; None where the plain operator must run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.gradients.binding import Binding
from pipeline.gradients.convolution import CONVOLUTION, Geometry, convolution
from pipeline.gradients.embedding import EMBEDDING, NO_PADDING, embedding
from pipeline.gradients.linear import LINEAR, linear

under_transform = torch._C._are_functorch_transforms_active
under_autocast = torch._C._is_any_autocast_enabled


def split_linear(binding: Binding, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """`x @ weight.T + bias`; x: (..., in), weight: (out, in), bias: (out)."""
    operand = _operand(binding, x, weight)
    own_bias = bias if isinstance(bias, nn.Parameter) else None
    site = None if operand is None or weight.dim() != 2 else binding.site(LINEAR, weight, own_bias)
    if operand is None or site is None:
        return None
    result = linear(operand, weight, own_bias, site)
    return result if bias is own_bias or bias is None else plus(result, bias)


def split_embedding(binding: Binding, indices: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor | None:
    """Rows of a table; indices: (...), weight: (rows, width); the row `padding_idx` gets no gradient."""
    if binding.current is None or type(indices) is not Tensor or under_transform():
        return None
    padding = NO_PADDING if padding_idx is None else padding_idx % len(weight)
    site = binding.site(EMBEDDING, weight, None, padding) if weight.dim() == 2 else None
    return None if site is None else embedding(indices, weight, site)


def split_convolution(
    binding: Binding,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor | None:
    """x: (batch, in, *space) or one sample without the first; weight: (out, in / groups, *kernel), bias: (out)."""
    operand = _operand(binding, x, weight)
    dimensions = weight.dim() - 2
    if operand is None or operand.dim() not in (dimensions + 1, dimensions + 2):
        return None
    dilations = _each(dilation, dimensions)
    left, right = _padding(padding, weight.shape[2:], dilations)
    if left != right:
        outside = [side for pair in zip(reversed(left), reversed(right), strict=True) for side in pair]
        operand, left = functional.pad(operand, outside), (0,) * dimensions
    own_bias = bias if isinstance(bias, nn.Parameter) else None
    geometry = Geometry(_each(stride, dimensions), left, dilations, groups)
    site = binding.site(CONVOLUTION, weight, own_bias, geometry)
    if site is None:
        return None
    if operand.dim() == dimensions + 2:
        result = convolution(operand, weight, own_bias, site)
    else:
        result = convolution(operand.unsqueeze(0), weight, own_bias, site).squeeze(0)
    return result if bias is own_bias or bias is None else plus(result, bias.reshape(-1, *[1] * dimensions))


def plus(product: Tensor, other: Tensor) -> Tensor:
    """What the operator adds to its product; under autocast it is cast with the operands, and the sum is not wider."""
    return product + (other.to(product.dtype) if under_autocast() else other)


def _operand(binding: Binding, x: Tensor, weight: Tensor) -> Tensor | None:
    """The input as the operator takes it, cast as autocast would.

    None also where dtypes differ: the plain operator then raises the error that its users know.
    """
    if binding.current is None or type(x) is not Tensor or under_transform():
        return None
    kind = weight.device.type
    if torch.is_autocast_enabled(kind) and x.is_floating_point() and torch.float64 not in (x.dtype, weight.dtype):
        return x.to(torch.get_autocast_dtype(kind))
    return x if x.dtype is weight.dtype else None


def _each(value: int | Sequence[int], dimensions: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * dimensions
    return tuple(value) if len(value) == dimensions else tuple(value) * dimensions


def _padding(
    padding: str | int | Sequence[int], kernel: Sequence[int], dilation: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Padding before and behind, one number a dimension; "same" puts the odd one behind."""
    if padding == "valid":
        padding = 0
    if padding == "same":
        totals = [step * (size - 1) for size, step in zip(kernel, dilation, strict=True)]
        return tuple(total // 2 for total in totals), tuple(total - total // 2 for total in totals)
    both = _each(padding, len(kernel))  # type: ignore[arg-type]
    return both, both

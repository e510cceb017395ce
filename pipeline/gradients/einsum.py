"""torch.einsum of an activation and a weight, written as a linear layer where it is one."""

from __future__ import annotations

import math

from torch import Tensor, nn

from pipeline.gradients.binding import Binding
from pipeline.gradients.calls import split_linear


def split_einsum(binding: Binding, equation: str, *operands: Tensor) -> Tensor | None:
    """`torch.einsum(equation, x, weight)`, in either order.

    It is a linear layer if each index of the weight is either summed, and then an index of x alone, or
    kept, and then not one of x; None otherwise, also for an ellipsis, repeated indices or a weight that
    would have to be copied.
    """
    terms, _, output = equation.replace(" ", "").partition("->")
    names = terms.split(",")
    if len(operands) != 2 or len(names) != 2 or "->" not in equation or "." in equation:
        return None
    if _is_weight(operands[0]) == _is_weight(operands[1]):
        return None
    if _is_weight(operands[0]):
        operands, names = operands[::-1], names[::-1]
    (x, weight), (of_x, of_weight) = operands, names
    if len(of_x) != x.dim() or len(of_weight) != weight.dim():
        return None
    summed = [index for index in of_weight if index in of_x]
    kept = [index for index in of_weight if index not in of_x]
    rows = [index for index in of_x if index not in of_weight]
    if sorted(rows + kept) != sorted(output) or not summed or len(set(of_x)) < len(of_x):
        return None
    if len(set(of_weight)) < len(of_weight):
        return None
    sizes = dict(zip(of_weight, weight.shape, strict=True)) | dict(zip(of_x, x.shape, strict=True))
    matrix = _as_matrix(weight, [[of_weight.index(i) for i in group] for group in (kept, summed)])
    if matrix is None or any(weight.shape[of_weight.index(i)] != sizes[i] for i in summed):
        return None
    flat = x.permute([of_x.index(i) for i in rows + summed]).reshape(*(sizes[i] for i in rows), matrix.shape[1])
    result = split_linear(binding, flat, matrix)
    if result is None:
        return None
    shaped = result.reshape([sizes[i] for i in rows + kept])
    return shaped.permute([(rows + kept).index(i) for i in output])


def _is_weight(operand: Tensor) -> bool:
    return isinstance(operand, nn.Parameter) or isinstance(operand._base, nn.Parameter)


def _as_matrix(weight: Tensor, groups: list[list[int]]) -> Tensor | None:
    """The weight with each group of its dimensions joined into one, as a view; None if that takes a copy."""
    ordered = weight.permute([dimension for group in groups for dimension in group])
    shape = [math.prod(weight.shape[dimension] for dimension in group) for group in groups]
    try:
        return ordered.view(shape)
    except RuntimeError:
        return None

"""A place in a layer where an operator uses a trainable weight: what its forward checks and its backward needs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline.gradients.flat import FlatLayer
from pipeline.gradients.scratch import Scratch


class Site:
    """A trainable weight (and bias), the views their gradients accumulate into, and the memory for casts.

    `bias_gradient` is set where the operator adds the bias's gradient itself, since it is wider than the bias; where
    it is None the gradient goes back to autograd, whose addition in C++ is the cheapest.
    """

    __slots__ = (
        "_own_hooks",
        "bias",
        "bias_gradient",
        "device_type",
        "dtype",
        "gradient",
        "scratch",
        "weight",
    )

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, flat: FlatLayer, scratch: Scratch
    ) -> None:
        gradient = flat.gradient_of(weight)
        if gradient is None:
            raise ValueError("the weight of a site must be a trainable parameter of the layer")
        self.weight = weight
        self.bias = bias
        self.gradient = gradient
        wide = bias is not None and bias.requires_grad and flat.is_widened(bias)
        self.bias_gradient = flat.gradient_of(bias) if bias is not None and wide else None
        self.scratch = scratch
        self.dtype = weight.dtype
        self.device_type = weight.device.type
        self._own_hooks = int(flat.is_widened(weight))

    def accepts(self, x: Tensor) -> bool:
        """Whether the split operator may take this input now; if not, the caller runs the plain one."""
        weight = self.weight
        return (
            type(x) is Tensor
            and weight.requires_grad
            and not weight._backward_hooks
            and len(weight._post_accumulate_grad_hooks or ()) == self._own_hooks
            and torch.is_grad_enabled()
            and not torch._C._are_functorch_transforms_active()
        )

    def operand(self, x: Tensor) -> Tensor | None:
        """`x` as the operator takes it, cast as autocast would; None if the plain operator must take it.

        Also where the dtypes differ: the plain operator then raises the error that its users know.
        """
        if not self.accepts(x):
            return None
        if torch.is_autocast_enabled(self.device_type) and self.dtype != torch.float64:
            return x.to(torch.get_autocast_dtype(self.device_type))
        return x if x.dtype is self.dtype else None

"""Autograd functions without the frames of Python that torch puts around their forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def direct(function: Any) -> Callable[..., Any]:
    """The function's ``apply``, for what runs often: at width 64 the frames are 2 % of a linear layer.

    Around forward there is one for torch.func transforms, so that nothing may call this under one; around backward, in
    the node of the graph, one for older spellings.
    """
    function._backward_cls.apply = function.backward
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply
    return apply

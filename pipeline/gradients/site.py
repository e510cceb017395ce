"""A place in a layer where an operator uses a trainable weight, and the weight itself: what their backward asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from pipeline.gradients.flat import FlatLayer

if TYPE_CHECKING:
    from pipeline.gradients.binding import Binding


class Target:
    """A trainable parameter that split operators use, and who else adds to its gradient.

    `mixed`: autograd adds to the gradient as well, so all of it is left to autograd. `late`: in a full B
    the products wait for the end of the backward, as long as it is not known whether it is mixed.
    """

    __slots__ = (
        "additions",
        "gradient",
        "hooked",
        "late",
        "mixed",
        "name",
        "own_hooks",
        "parameter",
        "plain",
        "preset",
        "sites",
    )

    def __init__(self, parameter: nn.Parameter, gradient: Tensor, flat: FlatLayer) -> None:
        self.parameter = parameter
        self.gradient = gradient
        self.name = flat.name_of(parameter)
        # An alias without a graph, for the operators' own arithmetic.
        self.plain = parameter.detach()
        self.preset = flat.preset_of(parameter)
        self.own_hooks = int(flat.is_widened(parameter))
        self.late = True
        self.mixed = False
        self.hooked = False
        self.additions = 0
        self.sites: list[Site] = []

    def has_hooks(self) -> bool:
        """Whether the user has hooks on the parameter, which want to see its gradient."""
        hooks = self.parameter._post_accumulate_grad_hooks
        return bool(self.parameter._backward_hooks) or (len(hooks) if hooks else 0) != self.own_hooks


class Operator(NamedTuple):
    """How the gradient of a weight comes from the input and the gradient of the output.

    `accumulate(site, x, dy)` adds it into the site's view, in the view's dtype; `product(site, x, dy)`
    returns it as autograd would compute it, in the dtype of x.
    """

    accumulate: Callable[[Any, Tensor, Tensor], None]
    product: Callable[[Any, Tensor, Tensor], Tensor]


class Site:
    """One use of a weight by an operator.

    `plain` is the weight as the operator sees it, which may be a view of the parameter, but without a
    graph; `gradient` the view of its gradient in the same form. `ordinary`: gradients go back to autograd,
    for hooks to see them. The gradient of the bias is added into `bias_gradient` during I; where that is
    None it goes back to autograd.
    """

    __slots__ = (
        "bias",
        "bias_gradient",
        "bias_target",
        "binding",
        "details",
        "dtype",
        "gradient",
        "name",
        "ones",
        "operator",
        "ordinary",
        "plain",
        "plain_bias",
        "reference",
        "shape",
        "target",
    )

    def __init__(
        self,
        binding: Binding,
        operator: Operator,
        target: Target,
        plain: Tensor,
        gradient: Tensor,
        bias: nn.Parameter | None,
        bias_target: Target | None,
        details: Any,
    ) -> None:
        self.binding = binding
        self.operator = operator
        self.target = target
        self.name = target.name
        self.plain = plain
        self.gradient = gradient
        self.shape = tuple(gradient.shape)
        self.details = details
        self.bias = bias
        self.bias_target = bias_target
        self.plain_bias = None if bias is None else bias.detach()
        self.reference = binding.reference
        self.bias_gradient = None if bias_target is None or binding.reference else bias_target.gradient
        kinds = {t.dtype for t in (plain, gradient, self.plain_bias, self.bias_gradient) if t is not None}
        self.dtype = kinds.pop() if len(kinds) == 1 else None
        self.ones = binding.scratch.ones(gradient if bias_target is None else bias_target.gradient)
        self.ordinary = False

"""A layer whose operators split: its sites, and the queue of the micro-batch that passes through it."""

from __future__ import annotations

from collections.abc import Hashable
from types import TracebackType
from typing import Protocol

from torch import Tensor, nn

from pipeline.gradients.flat import FlatLayer, view_of
from pipeline.gradients.queue import WeightGradQueue
from pipeline.gradients.report import SplitReport, Weight
from pipeline.gradients.scratch import Scratch
from pipeline.gradients.site import Operator, Site, Target

MOST_SITES = 1024
"""Sites that one layer may have; a layer that cuts its weights anew in each call takes the plain operators then."""


class Watch(Protocol):
    """Sees the functional operators that user code calls on weights, from start to stop."""

    def start(self) -> None:
        """User code may run from here."""

    def stop(self, *, backward: bool) -> None:
        """It has run."""


class Binding:
    """What the operators of one use of a layer share, and how the engine tells them which micro-batch passes.

        with binding.forward(queue):                    # one queue for each micro-batch
            output = layer(input)
        with binding.backward(queue, inline=False):     # I; inline=True: a full B, which empties the queue
            torch.autograd.backward(output, gradient)
        queue.drain()                                   # W

    Outside of these nothing is split. With `reference`, gradients accumulate as autograd does it, bit for bit.
    """

    __slots__ = (
        "_backward",
        "_forward",
        "_sites",
        "_step",
        "_targets",
        "_unsettled",
        "_weights",
        "current",
        "flat",
        "rebound",
        "reference",
        "scratch",
        "unrecognised",
        "watch",
    )

    def __init__(self, flat: FlatLayer, scratch: Scratch, *, reference: bool = False) -> None:
        self.flat = flat
        self.scratch = scratch
        self.reference = reference
        self.current: WeightGradQueue | None = None
        self.rebound: list[nn.Module] = []
        self.watch: Watch | None = None
        self.unrecognised: dict[str, set[str]] = {}  # operators that took a weight and are not split, by its name
        # One object each, used again for every micro-batch.
        self._forward = Pass(self, backward=False)
        self._backward = Pass(self, backward=True)
        self._sites: dict[Hashable, Site] = {}
        self._targets: dict[int, Target] = {}
        self._weights: list[Target] = []
        self._step = -1
        self._unsettled = False

    def forward(self, queue: WeightGradQueue) -> Pass:
        """A context in which operators bind this queue into the graph."""
        self._forward.queue = queue
        return self._forward

    def backward(self, queue: WeightGradQueue, *, inline: bool) -> Pass:
        """A context in which operators leave gradients of weights to this queue, or add them at once (`inline`)."""
        queue.inline = inline
        self._backward.queue = queue
        return self._backward

    def report(self) -> SplitReport:
        """What of the layer's weights is split, after its first micro-batch."""
        entries = []
        for name, parameter in self.flat.trainable().items():
            target = self._targets.get(id(parameter))
            reason = "no operator that is split takes it"
            if target is not None and target.sites:
                reason = ""
                if any(site.ordinary for site in target.sites):
                    reason = "hooks see it" if target.hooked else "autograd adds to its gradient as well"
            if parameter.dim() >= 2:
                operators = tuple(sorted(self.unrecognised.get(name, ())))
                entries.append(Weight(name, parameter.numel(), reason, operators))
        return SplitReport(tuple(entries))

    def defers_all(self) -> bool:
        """Whether the backward that has just run has added nothing to the gradient of any matrix: all is in the queue.

        What autograd adds raises the version of a gradient, so that nothing is taken for deferred that is not.
        """
        for parameter in self.flat.trainable().values():
            if parameter.dim() >= 2:
                target = self._targets.get(id(parameter))
                clean = target is not None and target.sites and not target.late and not target.mixed
                if not clean or target is None or any(site.ordinary for site in target.sites):
                    return False
                if target.preset._version != target.additions:
                    return False
        return True

    def site(
        self, operator: Operator, weight: Tensor, bias: nn.Parameter | None = None, details: Hashable = None
    ) -> Site | None:
        """The site of this use of a parameter, or of a view of one; None if the plain operator must take it."""
        whole = isinstance(weight, nn.Parameter)
        parameter = weight if whole else weight._base
        geometry = None if whole else (weight.shape, weight.stride(), weight.storage_offset())
        key = (operator, id(parameter), geometry, id(bias), details)
        site = self._sites.get(key)
        if site is None and parameter is not None and weight.requires_grad and len(self._sites) < MOST_SITES:
            site = self._new_site(operator, weight, parameter, bias, details)
            if site is not None:
                self._sites[key] = site
        return site

    def _new_site(
        self, operator: Operator, weight: Tensor, parameter: Tensor, bias: nn.Parameter | None, details: Hashable
    ) -> Site | None:
        target = self._target(parameter)
        if target is None or weight.dtype != parameter.dtype or not _is_disjoint(weight):
            return None
        gradient, plain = target.gradient, target.plain
        if weight is not parameter:
            start = weight.storage_offset() - parameter.storage_offset()
            gradient = view_of(gradient, weight.shape, weight.stride(), int(start + gradient.storage_offset()))
            plain = plain.as_strided(weight.shape, weight.stride(), weight.storage_offset())
        bias_target = None if bias is None or not bias.requires_grad else self._target(bias)
        site = Site(self, operator, target, plain, gradient, bias, bias_target, details)
        if not target.sites:
            self._weights.append(target)
        target.sites.append(site)
        self._unsettled = True
        self._step = -1
        return site

    def _target(self, parameter: Tensor) -> Target | None:
        target = self._targets.get(id(parameter))
        if target is None and isinstance(parameter, nn.Parameter) and not parameter.is_complex():
            gradient = self.flat.gradient_of(parameter)
            if gradient is not None:
                target = self._targets[id(parameter)] = Target(parameter, gradient, self.flat)
        return target

    def begin(self) -> None:
        """A backward over the layer begins."""
        if self._step != self.flat.step:
            self._step = self.flat.step
            self._look_for_changes()
        if self._unsettled:
            for target in self._weights:
                target.additions = target.preset._version

    def end(self, queue: WeightGradQueue) -> None:
        """A backward over the layer has ended; products that had to wait for autograd run now."""
        if self._unsettled:
            self._settle(queue)
        if queue.inline and queue.work:
            queue.drain()

    def _settle(self, queue: WeightGradQueue) -> None:
        """After the first backward that used a weight: may its products run by themselves from now on?

        Where autograd has added to the gradient too they may not: they run now, later ones in autograd. The
        order of the additions, hence every bit, is then the same wherever a schedule puts W.
        """
        in_queue = {site.target for site, _, _, _ in queue.work}
        for target in self._weights:
            if target.preset._version != target.additions:
                self._fall_back(target)
            elif target in in_queue:
                target.late = self.reference
        queue.take({target for target in self._weights if target.mixed}).drain()
        self._unsettled = any(target.late and not target.mixed for target in self._weights)

    def _look_for_changes(self) -> None:
        """Once a step: hooks that the user has set or removed, and additions by autograd that nobody expected.

        Not in every backward, since it touches every parameter: each costs a handful of cache misses.
        """
        for target in self._targets.values():
            target.hooked = target.has_hooks()
        for target in self._weights:
            additions = target.preset._version
            if additions != target.additions:
                self._fall_back(target)
            target.additions = additions
            for site in target.sites:
                hooked = target.hooked or (site.bias_target is not None and site.bias_target.hooked)
                site.ordinary = target.mixed or hooked or (self.reference and len(target.sites) > 1)

    def _fall_back(self, target: Target) -> None:
        """Leave a gradient to autograd for good, if it has added to it although no site had asked it to."""
        if not any(site.ordinary for site in target.sites):
            target.mixed = True
            for site in target.sites:
                site.ordinary = True


class Pass:
    """A forward or backward of one micro-batch over the layer, as a context."""

    __slots__ = ("_backward", "_binding", "queue")

    def __init__(self, binding: Binding, *, backward: bool) -> None:
        self._binding = binding
        self._backward = backward
        self.queue = WeightGradQueue()

    def __enter__(self) -> None:
        binding = self._binding
        # Also in backward: what is recomputed there binds the same queue.
        binding.current = self.queue
        if self._backward:
            binding.begin()
            self.queue.is_open = True
        if binding.watch is not None:
            binding.watch.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        binding = self._binding
        binding.current = None
        queue = self.queue
        if binding.watch is not None:
            binding.watch.stop(backward=self._backward)
        if self._backward:
            queue.is_open = False
            if error is None:
                binding.end(queue)
            else:
                queue.clear()


def _is_disjoint(view: Tensor) -> bool:
    """Whether no two elements of a view share memory, so that one may add into it."""
    reach = 0
    for stride, size in sorted(zip(view.stride(), view.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return False
            reach += stride * (size - 1)
    return True

"""The weight gradients of one use of a layer by one micro-batch that are still to be computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import GradientError
from pipeline.gradients.site import Operator, Site, Target


class Foreign:
    """Work of an autograd function that is not ours; stands in the place of a site."""

    __slots__ = ("operator",)
    reference = False
    target = None
    name = ""

    def __init__(self, run: Callable[[], None]) -> None:
        self.operator = Operator(lambda site, x, dy: torch.no_grad()(run)(), lambda site, x, dy: dy)


Work = tuple[Site | Foreign, Tensor, Tensor, int]
"""(site, input, gradient of the output, version of the input); the sum runs over the first dimension of both.

The version tells if somebody has changed the input in place since.
"""

_NOTHING = torch.empty(0)


class WeightGradQueue:
    """Bound into the graph by forward, filled by I and emptied by W.

    Operators hand their work over only while the queue is open, that is while the engine's own backward runs; any other
    differentiation (`torch.autograd.grad` in a layer's forward) gets ordinary gradients.
    """

    __slots__ = ("inline", "is_open", "work")

    def __init__(self) -> None:
        self.work: list[Work] = []
        self.is_open = False
        self.inline = False

    def __len__(self) -> int:
        return len(self.work)

    @property
    def nbytes(self) -> int:
        """Bytes that the waiting work keeps alive, a storage that serves several entries counted once."""
        storages = [tensor.untyped_storage() for _, x, dy, _ in self.work for tensor in (x, dy)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def defer(self, run: Callable[[], None]) -> None:
        """Leave the weight gradient of an autograd function of one's own to W; in a full B it runs at once.

        Called in that function's backward, with the queue that was its binding's `current` in forward.
        """
        if self.is_open and not self.inline:
            self.work.append((Foreign(run), _NOTHING, _NOTHING, _NOTHING._version))
        else:
            run()

    def drain(self) -> None:
        """Add every waiting gradient into its view, first in first out, each released when it is done.

        Raises GradientError if an input was changed in place after I.
        """
        work, self.work = self.work, []
        work.reverse()
        while work:
            site, x, dy, version = work.pop()
            if x._version != version:
                raise _changed(site)
            if site.reference:
                work.append((site, x, dy, version))
                _drain_as_autograd(work)
            else:
                site.operator.accumulate(site, x, dy)

    def take(self, targets: AbstractSet[Target]) -> WeightGradQueue:
        """A queue with the work of some weights, which this one then no longer has."""
        taken = WeightGradQueue()
        taken.work = [work for work in self.work if work[0].target in targets]
        self.work = [work for work in self.work if work[0].target not in targets]
        return taken

    def clear(self) -> None:
        """Drop the waiting work, after a step that failed."""
        self.work.clear()


def drain_together(queues: Sequence[WeightGradQueue]) -> None:
    """Empty the queues of several micro-batches of one layer, equal uses in one product: larger matrices.

    Sums then run over the rows of all micro-batches, so that the result agrees with one drain after the other to
    rounding. If the uses differ in number or form between the micro-batches, they are drained one after the other.
    """
    alike = len({tuple(id(work[0]) for work in queue.work) for queue in queues}) == 1
    forms = {tuple((x.shape[1:], dy.shape[1:]) for _, x, dy, _ in queue.work) for queue in queues}
    if not alike or len(forms) > 1:
        for queue in queues:
            queue.drain()
        return
    for use in zip(*(queue.work for queue in queues), strict=True):
        for site, x, _, version in use:
            if x._version != version:
                raise _changed(site)
        joined = WeightGradQueue()
        x, dy = torch.cat([x for _, x, _, _ in use]), torch.cat([dy for _, _, dy, _ in use])
        joined.work.append((use[0][0], x, dy, x._version))
        joined.drain()
    for queue in queues:
        queue.clear()


def _drain_as_autograd(work: list[Work]) -> None:
    """Empty a reversed list of work: products of one weight are added to each other first, as autograd does it."""
    totals: dict[Any, Tensor] = {}
    while work:
        site, x, dy, version = work.pop()
        if x._version != version:
            raise _changed(site)
        product = site.operator.product(site, x, dy)
        totals[site] = totals[site] + product if site in totals else product
    for site, total in totals.items():
        site.gradient.add_(total)


def _changed(site: Site | Foreign) -> GradientError:
    return GradientError(
        f"the input of the operator on {site.name!r} was changed in place between I and W, which still needs it. "
        "Let the layer work on a copy (x.clone()), or choose a schedule that does not split the backward"
    )

"""The weight gradients of one use of a layer by one micro-batch that are still to be computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

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


class Work(NamedTuple):
    """One weight gradient to come; the first dimension of both tensors is the one that is summed over."""

    site: Site | Foreign
    x: Tensor
    dy: Tensor
    version: int
    """Of `x`, to notice that somebody has changed it since."""


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
        storages = [tensor.untyped_storage() for work in self.work for tensor in (work.x, work.dy)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def keep(self, site: Site, x: Tensor, dy: Tensor) -> None:
        """Leave a product to W; the graph that x comes from may go."""
        self.work.append(Work(site, x, dy, x._version))

    def defer(self, run: Callable[[], None]) -> None:
        """Leave the weight gradient of an autograd function of one's own to W; in a full B it runs at once.

        Called in that function's backward, with the queue that was its binding's `current` in forward.
        """
        if self.is_open and not self.inline:
            self.work.append(Work(Foreign(run), _NOTHING, _NOTHING, 0))
        else:
            run()

    def drain(self, only: AbstractSet[Target] | None = None) -> None:
        """Add the waiting gradients, or those of some weights, into their views; first in first out.

        Each is released when it is done. Raises GradientError if an input was changed in place after I.
        """
        waiting, self.work = self.work, []
        waiting.reverse()
        totals: dict[Any, Tensor] = {}
        while waiting:
            work = waiting.pop()
            site, x, dy, version = work
            if only is not None and site.target not in only:
                self.work.append(work)
                continue
            if x._version != version:
                raise _changed(site)
            del work
            if site.reference:
                product = site.operator.product(site, x, dy)
                totals[site] = totals[site] + product if site in totals else product
            else:
                site.operator.accumulate(site, x, dy)
        for site, total in totals.items():
            site.gradient.add_(total)

    def clear(self) -> None:
        """Drop the waiting work, after a step that failed."""
        self.work.clear()


def drain_together(queues: Sequence[WeightGradQueue]) -> None:
    """Empty the queues of several micro-batches of one layer, equal uses in one product: larger matrices.

    Sums then run over the rows of all micro-batches, so that the result agrees with one drain after the other to
    rounding. If the uses differ in number or form between the micro-batches, they are drained one after the other.
    """
    alike = len({tuple(id(work.site) for work in queue.work) for queue in queues}) == 1
    forms = {tuple((work.x.shape[1:], work.dy.shape[1:]) for work in queue.work) for queue in queues}
    if not alike or len(forms) > 1:
        for queue in queues:
            queue.drain()
        return
    for use in zip(*(queue.work for queue in queues), strict=True):
        for work in use:
            if work.x._version != work.version:
                raise _changed(work.site)
        joined = WeightGradQueue()
        x, dy = torch.cat([work.x for work in use]), torch.cat([work.dy for work in use])
        joined.work.append(Work(use[0].site, x, dy, x._version))
        joined.drain()
    for queue in queues:
        queue.clear()


def _changed(site: Site | Foreign) -> GradientError:
    return GradientError(
        f"the input of the operator on {site.name!r} was changed in place between I and W, which still needs it. "
        "Let the layer work on a copy (x.clone()), or choose a schedule that does not split the backward"
    )

"""The weight gradients of one use of a layer by one micro-batch that are still to be computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor

from pipeline.gradients.site import Operator, Site, Target


class Foreign:
    """Work of an autograd function that is not ours; stands in the place of a site."""

    __slots__ = ("operator",)
    reference = False
    target = None

    def __init__(self, run: Callable[[], None]) -> None:
        self.operator = Operator(lambda site, x, dy: torch.no_grad()(run)(), lambda site, x, dy: dy)


Work = tuple[Site | Foreign, Tensor, Tensor]
"""(site, input, gradient of the output); the first dimension of both tensors is the one that is summed over."""

_NOTHING = torch.empty(0)


class WeightGradQueue:
    """Bound into the graph by forward, filled by I and emptied by W.

    Operators hand their work over only while the queue is open, that is while the engine's own backward
    runs; any other differentiation (`torch.autograd.grad` in a layer's forward) gets ordinary gradients.
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
        storages = [tensor.untyped_storage() for _, *kept in self.work for tensor in kept]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def defer(self, run: Callable[[], None]) -> None:
        """Leave the weight gradient of an autograd function of one's own to W; in a full B it runs at once.

        Called in that function's backward, with the queue that was its binding's `current` in forward.
        """
        if self.is_open and not self.inline:
            self.work.append((Foreign(run), _NOTHING, _NOTHING))
        else:
            run()

    def drain(self, only: AbstractSet[Target] | None = None) -> None:
        """Add the waiting gradients, or those of some weights, into their views; first in first out.

        Each is released when it is done.
        """
        waiting, self.work = self.work, []
        waiting.reverse()
        totals: dict[Any, Tensor] = {}
        while waiting:
            site, x, dy = waiting.pop()
            if only is not None and site.target not in only:
                self.work.append((site, x, dy))
            elif site.reference:
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

    Sums then run over the rows of all micro-batches, so that the result agrees with one drain after the
    other to rounding. Uses that differ in number or form between the micro-batches are drained one after
    the other.
    """
    alike = len({tuple(id(site) for site, _, _ in queue.work) for queue in queues}) == 1
    forms = {tuple((x.shape[1:], dy.shape[1:]) for _, x, dy in queue.work) for queue in queues}
    if not alike or len(forms) > 1:
        for queue in queues:
            queue.drain()
        return
    for use in zip(*(queue.work for queue in queues), strict=True):
        together = WeightGradQueue()
        together.work.append((use[0][0], torch.cat([x for _, x, _ in use]), torch.cat([dy for _, _, dy in use])))
        together.drain()
    for queue in queues:
        queue.clear()

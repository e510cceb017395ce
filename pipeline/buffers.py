"""The buffers of a layer: put back to what they were where a forward must not count, and kept equal in all copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipeline.links.protocol import LANE_CONTROL, Exchange, Link, Pending
from pipeline.ties import Held

__all__ = ["Buffers", "Snapshot", "share_with_twins"]


class _Kept(NamedTuple):
    place: dict[str, Tensor | None]
    name: str
    buffer: Tensor | None
    copy: Tensor | None


class Snapshot(tuple[_Kept, ...]):
    """What buffers were at one time.

    All are copied: some operators and much user code change a buffer without raising its version.
    """

    __slots__ = ()

    @torch.no_grad()
    def put_back(self) -> None:
        """Make the buffers, and which tensors they are, what they were."""
        for place, name, buffer, copy in self:
            place[name] = buffer
            if buffer is not None and copy is not None:
                buffer.copy_(copy)

    def outdated(self) -> bool:
        """Whether some buffer is another tensor now, or has other values."""
        return any(
            place[name] is not buffer or (buffer is not None and copy is not None and not torch.equal(buffer, copy))
            for place, name, buffer, copy in self
        )

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While open, the module works on these copies, as if nothing had changed its buffers since.

        For the forward of a recomputation: the buffers have seen this micro-batch already, and later ones too.  Its
        graph may keep the copies, which nothing changes afterwards.
        """
        now = [(place, name, place[name]) for place, name, _, _ in self]
        for place, name, _, copy in self:
            place[name] = copy
        try:
            yield
        finally:
            for place, name, buffer in now:
                place[name] = buffer


class Buffers:
    """The buffers of a module and its children, wherever an assignment may put others in their place."""

    __slots__ = ("_owners",)

    def __init__(self, module: nn.Module | None) -> None:
        self._owners = () if module is None else tuple(child for child in module.modules() if child._buffers)

    def snapshot(self) -> Snapshot:
        """What they are now."""
        copies: dict[int, Tensor] = {}  # a buffer that two modules share stays one

        def copied(buffer: Tensor) -> Tensor:
            if id(buffer) not in copies:
                copies[id(buffer)] = buffer.detach().clone()
            return copies[id(buffer)]

        return Snapshot(
            _Kept(place, name, buffer, None if buffer is None else copied(buffer))
            for place, name, buffer in self._all()
        )

    def hold(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the memory of one of them."""
        if not self._owners:
            return False
        address = tensor.untyped_storage().data_ptr()
        return any(b is not None and b.untyped_storage().data_ptr() == address for _, _, b in self._all())

    @torch.no_grad()
    def share(self, group: Exchange) -> None:
        """Make the saved ones those of the group's first member.  Collective over ranks that hold the same layer."""
        together = self.packed()
        if together is not None:
            group.broadcast(together, 0)
            if group.rank != 0:
                self.unpack(together)

    @torch.no_grad()
    def packed(self) -> Tensor | None:
        """The saved ones as bytes, None where there are none: one message carries all types, those that a backend
        cannot add among them."""
        saved = self._saved()
        return torch.cat([buffer.reshape(-1).view(torch.uint8) for buffer in saved]) if saved else None

    @torch.no_grad()
    def unpack(self, together: Tensor | None) -> None:
        """Make the saved ones what ``packed`` gave of the same layer elsewhere."""
        if together is None:
            return
        saved = self._saved()
        for buffer, part in zip(saved, together.split([b.nbytes for b in saved]), strict=True):
            buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))

    def _saved(self) -> list[Tensor]:
        return [
            buffer
            for owner in self._owners
            for name, buffer in owner._buffers.items()
            if buffer is not None and name not in owner._non_persistent_buffers_set
        ]

    def _all(self) -> Iterator[tuple[dict[str, Tensor | None], str, Tensor | None]]:
        for owner in self._owners:
            for name, buffer in owner._buffers.items():
                yield owner._buffers, name, buffer


def share_with_twins(buffers: Mapping[Held, Buffers], rank_of_layer: Mapping[Held, int], link: Link) -> None:
    """Give later copies of a layer the saved buffers of the first.  Collective over the ranks that hold copies.

    ``rank_of_layer`` are ranks of the link, of every copy of every layer.
    """
    later = sorted(held for held in rank_of_layer if held.copy)
    pending: list[Pending] = []
    arriving: list[tuple[Buffers, Tensor]] = []
    for held in later:
        first = Held(held.layer)
        of_first = buffers[first].packed() if first in buffers else None
        if held in buffers:
            mine = of_first if first in buffers else buffers[held].packed()
            if mine is not None:
                arriving.append((buffers[held], mine))
                if first not in buffers:
                    pending.append(link.receive(rank_of_layer[first], mine, LANE_CONTROL))
        elif of_first is not None:
            pending.append(link.send(rank_of_layer[held], of_first, LANE_CONTROL))
    for transfer in pending:
        transfer.wait()
    for own, values in arriving:
        own.unpack(values)

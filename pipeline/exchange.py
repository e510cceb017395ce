"""Values and gradients between stages of different ranks: agreed forms, headers where none is agreed, posting."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.errors import FormVaried
from pipeline.links.protocol import LANE_B, LANE_CONTROL, LANE_F, Link, Pending
from pipeline.shapes import Form, TensorForm, Value, fits, form_of, memory

__all__ = ["Crossing", "Forms", "Inbox", "ShapeTable", "send_gradients", "send_value", "value_from"]


_HEADER_BYTES = 1024
_LENGTH_BYTES = 8
_POISONED = -1


class Crossing(NamedTuple):
    """A value on its way into a stage: the consuming stage and the micro-batch.  Its gradient comes back under
    the same name."""

    stage: int
    micro_batch: int


class ShapeTable:
    """The forms that ranks have agreed on: for each signature of a micro-batch's input, one at each boundary.

    The rank of a route's first stage numbers the signatures it sees; the step's opening agreement tells everyone;
    every rank keeps the forms of its own boundaries under these numbers.  A number below ``count`` is agreed.

    ``varying`` are the stages whose input has other forms for the same signature: always a header there.
    """

    def __init__(self) -> None:
        self.count = 0
        self.varying: set[int] = set()
        self._numbers: dict[Form, int] = {}
        self._forms: dict[tuple[int, int], Form] = {}

    def number(self, signatures: Sequence[Form]) -> list[int]:
        """A number for each signature: the agreed one, or a new one that is valid once the step has succeeded."""
        fresh: dict[Form, int] = {}
        numbers = []
        for signature in signatures:
            known = self._numbers.get(signature)
            numbers.append(known if known is not None else fresh.setdefault(signature, self.count + len(fresh)))
        return numbers

    def form(self, stage: int, number: int) -> Form | None:
        """The form that is agreed on, None where there is none."""
        return self._forms.get((stage, number)) if number < self.count and stage not in self.varying else None

    def learn(self, forms: Forms, signatures: dict[int, Form]) -> None:
        """Keep what a successful step taught; ``signatures`` are those of the micro-batches that entered here."""
        for micro_batch, signature in signatures.items():
            self._numbers[signature] = forms.numbers[micro_batch]
        self._forms.update(forms.taught)
        self.varying |= forms.varying
        self.count = max(self.count, 1 + max(forms.numbers, default=-1))


class Forms:
    """The forms of one step: those agreed before it, and those that headers bring while it runs."""

    def __init__(self, table: ShapeTable, numbers: Sequence[int]) -> None:
        self.numbers = tuple(numbers)
        self.taught: dict[tuple[int, int], Form] = {}
        self.varying: set[int] = set()
        self._table = table
        self._brought: dict[Crossing, Form | None] = {}

    def agreed(self, at: Crossing) -> Form | None:
        """The form that both sides knew before the step."""
        return self._table.form(at.stage, self.numbers[at.micro_batch])

    def get(self, at: Crossing) -> Form | None:
        """The form of a value that has crossed or may; None where nobody knows it, or the sender had failed before."""
        return self._brought[at] if at in self._brought else self.agreed(at)

    def poisoned(self, at: Crossing) -> bool:
        """Whether a header has told that the sender had failed before it."""
        return at in self._brought and self._brought[at] is None

    def bring(self, at: Crossing, form: Form | None) -> None:
        """Note what a header said.  A gradient flows for a tensor if it did for any micro-batch alike."""
        self._brought[at] = form
        if form is None:
            return
        where = (at.stage, self.numbers[at.micro_batch])
        before = self.taught.setdefault(where, form)
        if _without_gradients(before) == _without_gradients(form):
            self.taught[where] = _with_gradients_of(form, before)
        else:
            self.varying.add(at.stage)


def _with_gradients_of(form: Form, other: Form) -> Form:
    """A form that needs a gradient wherever one of the two does; they differ in nothing else."""
    pairs = zip(form.leaves, other.leaves, strict=True)
    return Form(form.structure, tuple(b if isinstance(b, TensorForm) and b.needs_gradient else a for a, b in pairs))


def _without_gradients(form: Form) -> Form:
    leaves = tuple(x._replace(needs_gradient=False) if isinstance(x, TensorForm) else x for x in form.leaves)
    return Form(form.structure, leaves)


# -- sending -------------------------------------------------------------------------------------------------


def send_value(
    link: Link, peer: int, at: Crossing, value: Value | None, forms: Forms, device: torch.device
) -> list[Pending]:
    """Send a stage's output; ``None`` stands for the output of a rank that failed in this step.

    Nothing is ever sent but what the receiver has posted: an agreed form exactly, or a header and what it says.

    Raises ``FormVaried`` before anything is sent when the value does not have the form that was agreed on.
    """
    agreed = forms.agreed(at)
    if value is None:
        if agreed is None:
            forms.bring(at, None)
            return _send_header(link, peer, None)
        return [_send(link, peer, _blank(form, device), LANE_F) for form in agreed.tensors]
    pending: list[Pending] = []
    if agreed is None:
        form = form_of(value)
        forms.bring(at, form)
        pending = _send_header(link, peer, form)
    elif not fits(value, agreed):
        raise FormVaried(at.stage)
    return pending + [_send(link, peer, leaf, LANE_F) for leaf in value.leaves if isinstance(leaf, Tensor)]


def send_gradients(
    link: Link,
    peer: int,
    at: Crossing,
    gradients: Sequence[Tensor | None] | None,
    forms: Forms,
    device: torch.device,
) -> list[Pending]:
    """Send back the gradients of a value that crossed: zeros for tensors that were used nowhere."""
    form = forms.get(at)
    if form is None:
        return []
    wanted = form.returning
    given = gradients if gradients is not None else [None] * len(wanted)
    return [
        _send(link, peer, g if g is not None else _blank(tensor, device), LANE_B)
        for tensor, g in zip(wanted, given, strict=True)
    ]


def _send(link: Link, peer: int, tensor: Tensor, lane: int) -> Pending:
    return link.send(peer, memory(tensor), lane)


def _blank(form: TensorForm, device: torch.device) -> Tensor:
    return form.empty(device).zero_()


def _send_header(link: Link, peer: int, form: Form | None) -> list[Pending]:
    """A header of fixed size, followed by another message where the text of the form is longer than that.

    It lies in host memory, so that reading it makes nobody wait for an accelerator.
    """
    text = b"" if form is None else pickle.dumps(form)
    length = _POISONED if form is None else len(text)
    head = length.to_bytes(_LENGTH_BYTES, "little", signed=True) + text
    first, rest = head[:_HEADER_BYTES].ljust(_HEADER_BYTES, b"\0"), head[_HEADER_BYTES:]
    parts = [first, rest] if rest else [first]
    return [link.send(peer, torch.frombuffer(bytearray(p), dtype=torch.uint8), LANE_CONTROL) for p in parts]


# -- receiving -----------------------------------------------------------------------------------------------


_Arrival = tuple[Form | None, list[Tensor], list[Pending]]


class Inbox:
    """What one rank receives from one peer on one lane during a step, in the order in which it is sent.

    Receives are posted up to ``depth`` messages ahead of the one the Program has come to.
    """

    def __init__(
        self,
        link: Link,
        peer: int,
        lane: int,
        crossings: Sequence[Crossing],
        depth: int,
        device: torch.device,
    ) -> None:
        self._link = link
        self._peer = peer
        self._lane = lane
        self._crossings = tuple(crossings)
        self._depth = depth
        self._device = device
        self._posted = 0
        self._arrivals: dict[Crossing, _Arrival] = {}

    def open(self, forms: Forms) -> None:
        """Start a step: post the first receives."""
        self._posted = 0
        self._arrivals = {}
        self._forms = forms
        self.post(-1)

    def post(self, index: int) -> None:
        """Post receives up to ``depth`` beyond message ``index``, as far as their forms are known."""
        last = min(len(self._crossings), index + 1 + self._depth)
        while self._posted < last and self._post_next():
            pass

    def _post_next(self) -> bool:
        """Post the next message, if its form is known."""
        at = self._crossings[self._posted]
        form = self._forms.get(at)
        if form is None:
            if not self._forms.poisoned(at):
                return False
            self._arrivals[at] = None, [], []
        else:
            buffers = [leaf.empty(self._device) for leaf in (form.returning if self._lane == LANE_B else form.tensors)]
            receive, peer, lane = self._link.receive, self._peer, self._lane
            self._arrivals[at] = form, buffers, [receive(peer, memory(buffer), lane) for buffer in buffers]
        self._posted += 1
        return True

    def take(self, at: Crossing) -> tuple[Form | None, list[Tensor]]:
        """Wait for a message; its form and tensors.  The form is None when the sender had failed before it."""
        while at not in self._arrivals:  # what is sent before it may be needed after it
            if not self._post_next():
                self._forms.bring(self._crossings[self._posted], self._receive_header())
        form, buffers, pending = self._arrivals.pop(at)
        for transfer in pending:
            transfer.wait()
        return form, buffers

    def _receive_header(self) -> Form | None:
        head = self._receive_bytes(_HEADER_BYTES)
        length = int.from_bytes(head[:_LENGTH_BYTES], "little", signed=True)
        if length == _POISONED:
            return None
        text = head[_LENGTH_BYTES : _LENGTH_BYTES + length]
        if len(text) < length:
            text += self._receive_bytes(length - len(text))
        form: Form = pickle.loads(text)
        return form

    def _receive_bytes(self, count: int) -> bytes:
        buffer = torch.empty(count, dtype=torch.uint8)
        self._link.receive(self._peer, buffer, LANE_CONTROL).wait()
        return bytes(buffer.numpy())


def value_from(form: Form, tensors: Sequence[Tensor]) -> Value:
    """The value that a form and its received tensors make."""
    if len(tensors) == len(form.leaves):
        return Value(tensors, form.structure, form.needs_gradient)
    remaining = iter(tensors)
    leaves = [next(remaining) if isinstance(leaf, TensorForm) else leaf.value for leaf in form.leaves]
    return Value(leaves, form.structure, form.needs_gradient)

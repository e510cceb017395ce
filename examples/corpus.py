"""The text that train_gpt.py learns from: bytes of whole documents, some of them held out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

Item = tuple[Tensor, Tensor]


class Text(NamedTuple):
    """Bytes as 1-D integer tensors."""

    train: Tensor
    held_out: Tensor


def load(path: Path | None) -> Text:
    """The topics of Python's own documentation, every tenth held out; or a file, whose last tenth is.

    Topics quote each other, so paragraphs of a held-out one are taken out of all others.
    """
    if path is not None:
        whole = path.read_bytes()
        border = len(whole) * 9 // 10
        return Text(_bytes(whole[:border]), _bytes(whole[border:]))
    from pydoc_data.topics import topics

    documents = [topics[name].strip("\n").split("\n\n") for name in sorted(topics)]
    held_out = [paragraph for document in documents[5::10] for paragraph in document]
    del documents[5::10]
    known = set(held_out)
    train = [paragraph for document in documents for paragraph in document if paragraph not in known]
    return Text(_bytes("\n\n".join(train).encode()), _bytes("\n\n".join(held_out).encode()))


def _bytes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def random_windows(text: Tensor, length: int, rows: int, seed: int) -> Iterator[Item]:
    """Micro-batches without end: windows at random, and as targets the same one byte further on.

    The same seed gives the same ones, on any rank and after any restart; torch's own generator is left alone.
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - length, (rows,), generator=generator)
        window = torch.stack([text[start : start + length + 1] for start in starts])
        yield window[:, :-1], window[:, 1:]


def all_windows(text: Tensor, length: int, rows: int) -> list[Item]:
    """The whole text once, in micro-batches; a last piece shorter than a window is left out."""
    count = (len(text) - 1) // length
    inputs, targets = (text[shift : shift + count * length].view(count, length) for shift in (0, 1))
    return list(zip(inputs.split(rows), targets.split(rows), strict=True))

"""Parts of vectors in checkpoints: what a rank holds of an entry is written and read by where it lies in the whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

__all__ = ["Chunk", "Described", "Entries", "ReadPlanner", "WritePlanner", "sorted_out"]


class Chunk(NamedTuple):
    """Elements of a vector of ``numel``, from ``offset`` on."""

    values: Tensor
    offset: int
    numel: int


class Described(NamedTuple):
    """What an entry is, without its values: a vector, in whatever chunks, or a tensor of any shape."""

    dtype: torch.dtype
    size: tuple[int, ...]


Entries = Mapping[str, Tensor | Chunk]
"""By name: a whole tensor, or what this rank holds of a vector."""

Chunks = Mapping[tuple[str, int], Chunk]
"""By name and offset."""


def sorted_out(parts: Iterable[Entries]) -> tuple[dict[str, Tensor], dict[tuple[str, int], Chunk]]:
    """The whole tensors and the chunks of several ranks' entries, each once."""
    whole: dict[str, Tensor] = {}
    chunks: dict[tuple[str, int], Chunk] = {}
    for part in parts:
        for name, value in part.items():
            if isinstance(value, Chunk):
                chunks[name, value.offset] = value
            else:
                whole[name] = value
    return whole, chunks


class WritePlanner(DefaultSavePlanner):
    """Plans to write chunks beside the whole tensors of a state dict."""

    def __init__(self, chunks: Chunks) -> None:
        super().__init__(flatten_state_dict=False)
        self._chunks = chunks

    def create_local_plan(self) -> SavePlan:
        items = [_write_item(name, chunk) for (name, _), chunk in self._chunks.items()]
        return SavePlan([*super().create_local_plan().items, *items])

    def lookup_object(self, index: MetadataIndex) -> Any:
        chunk = self._chunks.get((index.fqn, index.offset[0])) if index.offset else None
        return super().lookup_object(index) if chunk is None else chunk.values


class ReadPlanner(DefaultLoadPlanner):
    """Plans to read chunks beside the whole tensors of a state dict, in place, whatever chunks were written."""

    def __init__(self, chunks: Chunks) -> None:
        super().__init__(flatten_state_dict=False)
        self._chunks = chunks

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = list(super().create_local_plan().items)
        for (name, _), chunk in self._chunks.items():
            stored = None if self.metadata is None else self.metadata.state_dict_metadata[name]
            if isinstance(stored, TensorStorageMetadata):
                items += create_read_items_for_chunk_list(name, stored, [_place(chunk)])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        chunk = self._chunks.get((index.fqn, index.offset[0])) if index.offset else None
        return super().lookup_tensor(index) if chunk is None else chunk.values


def _place(chunk: Chunk) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([chunk.offset]), torch.Size([chunk.values.numel()]))


def _write_item(name: str, chunk: Chunk) -> WriteItem:
    place = _place(chunk)
    data = TensorWriteData(place, TensorProperties.create_from_tensor(chunk.values), torch.Size([chunk.numel]))
    return WriteItem(MetadataIndex(name, place.offsets), WriteItemType.SHARD, tensor_data=data)

"""Parts of vectors in checkpoints: what a rank holds of an entry is written and read by where it lies in the whole."""

from __future__ import annotations

from collections.abc import Mapping
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

__all__ = ["Chunk", "Chunks", "Described", "ReadPlanner", "WritePlanner"]


class Chunk(NamedTuple):
    """Elements of a vector of ``numel``, from ``offset`` on."""

    values: Tensor
    offset: int
    numel: int


class Described(NamedTuple):
    """What an entry is, without its values; whatever its shape, it is written as a vector, in whatever chunks."""

    dtype: torch.dtype
    size: tuple[int, ...]


Chunks = Mapping[tuple[str, int], Chunk]
"""By name of the vector and offset in it."""


class WritePlanner(DefaultSavePlanner):
    """Plans to write chunks; there is nothing in the state dict that it is used with."""

    def __init__(self, chunks: Chunks) -> None:
        super().__init__(flatten_state_dict=False)
        self._chunks = chunks

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(name, chunk) for (name, _), chunk in self._chunks.items()])

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._chunks[index.fqn, (index.offset or (0,))[0]].values


class ReadPlanner(DefaultLoadPlanner):
    """Plans to read chunks in place, whatever chunks were written."""

    def __init__(self, chunks: Chunks) -> None:
        super().__init__(flatten_state_dict=False)
        self._chunks = chunks

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for (name, _), chunk in self._chunks.items():
            stored = None if self.metadata is None else self.metadata.state_dict_metadata[name]
            if isinstance(stored, TensorStorageMetadata):
                items += create_read_items_for_chunk_list(name, stored, [_place(chunk)])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._chunks[index.fqn, (index.offset or (0,))[0]].values


def _place(chunk: Chunk) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([chunk.offset]), torch.Size([chunk.values.numel()]))


def _write_item(name: str, chunk: Chunk) -> WriteItem:
    place = _place(chunk)
    data = TensorWriteData(place, TensorProperties.create_from_tensor(chunk.values), torch.Size([chunk.numel]))
    return WriteItem(MetadataIndex(name, place.offsets), WriteItemType.SHARD, tensor_data=data)

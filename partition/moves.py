"""The difference of two partitions: which layers go from which rank to which."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from partition.errors import PartitionError
from partition.partition import Partition, ranges
from schedules import Schedule


class Move(NamedTuple):
    """One layer that a rank gets from another."""

    layer: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Moves:
    """All moves between two partitions, by layer; a layer that stays on its rank has none."""

    moves: tuple[Move, ...]

    @staticmethod
    def between(old: Partition, new: Partition, schedule: Schedule, new_schedule: Schedule | None = None) -> Moves:
        """What changes from ``old`` under ``schedule`` to ``new`` under ``new_schedule``, the same one unless
        given.

        Where a schedule keeps two copies of a layer, a rank that lacks it gets it from the lowest rank that
        holds it. Raises PartitionError for partitions of different layer lists, or of other parts than their
        schedule has.
        """
        before, after = holders(old, schedule), holders(new, new_schedule or schedule)
        if len(before) != len(after):
            raise PartitionError(
                f"the partitions have {len(before)} and {len(after)} layers; give two of the same layer list"
            )
        pairs = enumerate(zip(before, after, strict=True))
        return Moves(
            tuple(
                Move(layer, min(sources), target)
                for layer, (sources, targets) in pairs
                for target in sorted(targets - sources)
            )
        )

    def text(self) -> str:
        """One line for each pair of ranks: "rank 0 -> rank 1: layers 3-5"."""
        grouped: dict[tuple[int, int], list[int]] = defaultdict(list)
        for layer, source, target in self.moves:
            grouped[source, target].append(layer)
        lines = (
            f"rank {source} -> rank {target}: layer{'s' if len(layers) > 1 else ''} {ranges(layers)}"
            for (source, target), layers in sorted(grouped.items())
        )
        return "\n".join(lines) or "no layer moves"


def holders(partition: Partition, schedule: Schedule) -> list[set[int]]:
    """The ranks that hold each layer."""
    if partition.parts != schedule.num_layer_groups:
        raise PartitionError(
            f"the partition has {partition.parts} parts, schedule {schedule.name!r} "
            f"{schedule.num_layer_groups}; give the schedule that each partition was cut for"
        )
    found: list[set[int]] = [set() for _ in range(partition.layers)]
    for group, rank in zip(schedule.layer_group_of_stage, schedule.rank_of_stage, strict=True):
        for layer in partition.layers_of(group):
            found[layer].add(rank)
    return found

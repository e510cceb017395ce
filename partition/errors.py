"""The errors of partitions: one tree, so that a caller can catch all of them as PartitionError."""

from __future__ import annotations


class PartitionError(ValueError):
    """Something about a profile, a split or a partition is wrong; the message says what to change."""


class FewerLayersThanStages(PartitionError):
    """There are not enough layers to give every stage one."""

    def __init__(self, layers: int, stages: int) -> None:
        super().__init__(
            f"{layers} layer{'' if layers == 1 else 's'} cannot fill {stages} stages, and automatic cuts "
            f"leave none empty; lower the number of ranks or stages_per_rank to at most {layers} stages in "
            f"all, write the model as more layers, or set partition to cut points, which may leave stages empty"
        )
        self.layers = layers
        self.stages = stages


class OutOfMemory(PartitionError):
    """No split was found that keeps within the memory caps."""


class UnknownMethod(PartitionError):
    """No method of partitioning has this name; the message names the nearest one."""


class ProfileError(PartitionError):
    """A profile is missing, damaged, or was measured on other layers."""

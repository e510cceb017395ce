"""Everything that can be wrong with a profile, a split or a partition."""


class PartitionError(ValueError):
    """A layer list cannot be cut as asked; the message says which setting to change."""


class FewerLayersThanStages(PartitionError):
    """There are not enough layers to give every stage one."""

    def __init__(self, layers: int, parts: int) -> None:
        super().__init__(
            f"{layers} layer{'' if layers == 1 else 's'} cannot fill {parts} stages: an automatic cut gives every "
            f"stage at least one layer; lower the number of ranks or stages_per_rank until their product is at "
            f"most {layers}, write the model as more layers, or give explicit cut points, which may leave stages empty"
        )
        self.layers = layers
        self.parts = parts


class OutOfMemory(PartitionError):
    """No split was found that fits the memory caps."""


class UnknownMethod(PartitionError):
    """The name of a partition method is not one of those there are."""


class ProfileError(PartitionError):
    """A profile is missing, damaged, or belongs to another layer list."""

"""What runs where: measured layer costs, exact cuts, and what a partition will cost in time and memory."""

from partition.costs import LayerCost, Profile, stage_costs
from partition.errors import (
    FewerLayersThanStages,
    OutOfMemory,
    PartitionError,
    ProfileError,
    UnknownMethod,
)
from partition.memory import RankMemory, StateBytes, predict_memory
from partition.methods import METHODS, make_partition
from partition.moves import Move, Moves
from partition.partition import Partition
from partition.predict import predict_timeline
from partition.split import split

__all__ = [
    "METHODS",
    "FewerLayersThanStages",
    "LayerCost",
    "Move",
    "Moves",
    "OutOfMemory",
    "Partition",
    "PartitionError",
    "Profile",
    "ProfileError",
    "RankMemory",
    "StateBytes",
    "UnknownMethod",
    "make_partition",
    "predict_memory",
    "predict_timeline",
    "split",
    "stage_costs",
]

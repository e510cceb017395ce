"""Gradients: the split of backward into I and W, and the vectors in which they accumulate."""

from pipeline.gradients.flat import FlatLayer, FlatVector, Segment, Slot, share_storage
from pipeline.gradients.queue import WeightGradQueue
from pipeline.gradients.scratch import Scratch
from pipeline.gradients.split import Binding, split

__all__ = [
    "Binding",
    "FlatLayer",
    "FlatVector",
    "Scratch",
    "Segment",
    "Slot",
    "WeightGradQueue",
    "share_storage",
    "split",
]

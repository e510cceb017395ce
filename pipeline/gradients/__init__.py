"""Gradients: the split of backward into I and W, and the vectors in which they accumulate."""

from pipeline.gradients.binding import Binding
from pipeline.gradients.flat import FlatLayer, FlatVector, Segment, Slot
from pipeline.gradients.queue import WeightGradQueue, drain_together
from pipeline.gradients.report import SplitReport, Weight
from pipeline.gradients.scratch import Scratch
from pipeline.gradients.split import split, unsplit

__all__ = [
    "Binding",
    "FlatLayer",
    "FlatVector",
    "Scratch",
    "Segment",
    "Slot",
    "SplitReport",
    "Weight",
    "WeightGradQueue",
    "drain_together",
    "split",
    "unsplit",
]

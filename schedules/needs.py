"""What must have run before an action: the one place that knows.

    action   takes in                    after
    F s m    the output of   F   s-1 m
    B s m    the gradient of B/I s+1 m   F s m
    I s m    the gradient of B/I s+1 m   F s m
    W s m                                I s m

s-1 and s+1 are the neighbours on the route of micro-batch m. What comes from another rank is a message.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedules.table import KIND, MICRO_BATCH, STAGE, B, F, I, Table, W

NOTHING = -1  # the action needs nothing here: it is the first of its route, or of its stage
MISSING = -2  # it needs an action that no row contains


class Needs(NamedTuple):
    """For each action, the number of the action it needs, or NOTHING, or MISSING."""

    source: NDArray[np.intp]
    """The action of the neighbouring stage whose result it takes in."""
    own: NDArray[np.intp]
    """The action of its own stage that it follows."""


def needs(
    actions: Table,
    previous_stage: NDArray[np.integer],
    next_stage: NDArray[np.integer],
    route_of_micro_batch: NDArray[np.integer],
) -> Needs:
    """The needs of every action of a schedule at once.

    ``previous_stage`` and ``next_stage`` have shape (routes, stages) and hold -1 where a route begins or ends
    or does not pass. ``actions`` must hold valid stages and micro-batches; it may be incomplete.
    """
    stage, kind, micro_batch = actions[:, STAGE], actions[:, KIND], actions[:, MICRO_BATCH]
    forward, backward, weight = kind == F, (kind == B) | (kind == I), kind == W

    # A full backward and an input gradient answer to the same question, so they share a slot.
    number = np.full((3, previous_stage.shape[1], route_of_micro_batch.size), MISSING, dtype=np.intp)
    slot = np.where(forward, 0, np.where(backward, 1, 2))
    number[slot, stage, micro_batch] = np.arange(len(actions))

    route = route_of_micro_batch[micro_batch]
    neighbour = np.where(forward, previous_stage[route, stage], next_stage[route, stage])
    takes_in = (neighbour >= 0) & ~weight
    source = np.full(len(actions), NOTHING, dtype=np.intp)
    source[takes_in] = number[slot[takes_in], neighbour[takes_in], micro_batch[takes_in]]

    own = np.full(len(actions), NOTHING, dtype=np.intp)
    own[backward] = number[0, stage[backward], micro_batch[backward]]
    own[weight] = number[1, stage[weight], micro_batch[weight]]
    return Needs(source, own)

"""The timeline of a step before it has run."""

from __future__ import annotations

from partition.costs import Profile, stage_costs
from partition.partition import Partition
from schedules import Schedule, Timeline, simulate


def predict_timeline(profile: Profile, partition: Partition, schedule: Schedule) -> Timeline:
    """What the simulator says of a schedule whose stages hold these layers.

    Raises ProfileError or PartitionError when the three do not belong together.
    """
    return simulate(schedule, stage_costs(profile, partition, schedule))

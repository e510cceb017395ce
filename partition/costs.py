"""What layers cost: measured once, saved, and summed over stages for the simulator."""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from partition.errors import PartitionError, ProfileError
from partition.partition import Partition
from schedules import Costs, Schedule

FORMAT = "pipeloom profile 1"
"""What the first entry of a saved profile says; the number rises when older readers cannot read it."""

REMEDY = "set profile to a file that Profile.save wrote, or leave it out to measure the layers again"

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
Speed = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class LayerCost(BaseModel):
    """What one layer costs for one micro-batch."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    type: str
    """Name of the layer's class or function, as ``type:REGEX`` sees it."""
    forward: Seconds
    input_grad: Seconds
    """Seconds of I, the gradient of the input."""
    weight_grad: Seconds
    """Seconds of W, the gradient of the weights; a full backward takes input_grad + weight_grad."""
    activation_bytes: Count = 0
    """Kept from F to I."""
    weight_grad_bytes: Count = 0
    """Kept from I to W."""
    output_bytes: Count = 0
    """What crosses to the next layer."""
    parameters: Count = 0
    parameter_bytes: Count = 0
    buffer_bytes: Count = 0

    @property
    def seconds(self) -> float:
        """F + I + W."""
        return self.forward + self.input_grad + self.weight_grad


class Profile(BaseModel):
    """The costs of all layers of a model, of the link between ranks, and what they were measured on.

    A layer's seconds are those on a rank of speed 1; on another they are divided by its speed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: Annotated[tuple[LayerCost, ...], Field(min_length=1)]
    hop: Seconds = 0.0
    """Seconds from the end of a send's producer to the earliest start of its receiver."""
    speeds: tuple[Speed, ...] = ()
    """How fast each rank of a pipeline is beside the typical one, whose seconds the layers' are; none: all alike."""
    rows: Annotated[int, Field(ge=1)] | None = None
    """Rows of the micro-batch that the layers were measured on, where its tensors have them."""
    device: str = "cpu"
    threads: Annotated[int, Field(ge=1)] = 1

    def speeds_for(self, ranks: int) -> tuple[float, ...]:
        """The speed of each of this many ranks, or () where they are the same or were measured on another number.

        Then nobody knows which machines the ranks are on, and all count as typical ones.
        """
        return self.speeds if len(self.speeds) == ranks else ()

    def digest(self) -> str:
        """16 hexadecimal digits, equal for equal profiles."""
        return hashlib.sha256(json.dumps(self.model_dump(), sort_keys=True).encode()).hexdigest()[:16]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON; the file appears whole or not at all."""
        target = Path(path)
        unfinished = target.with_name(f".{target.name}.{os.getpid()}-{threading.get_ident()}")
        text = json.dumps({"format": FORMAT, **self.model_dump()}, indent=1)
        try:
            unfinished.write_text(text + "\n", encoding="utf-8")
            os.replace(unfinished, target)
        finally:
            unfinished.unlink(missing_ok=True)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Profile:
        """Read what ``save`` wrote. Raises ProfileError for a missing, damaged or foreign file."""
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ProfileError(f"cannot read the profile {path}: {error.strerror}; {REMEDY}") from error
        except ValueError as error:
            raise ProfileError(f"{path} is damaged or not a profile: {error}; {REMEDY}") from error
        if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
            raise ProfileError(f'{path} is not a profile: it does not say "format": "{FORMAT}"; {REMEDY}')
        try:
            return Profile.model_validate(found)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            raise ProfileError(f"{path} is damaged: {place}: {first['msg']}; {REMEDY}") from error


def stage_costs(profile: Profile, partition: Partition, schedule: Schedule) -> Costs:
    """F, I and W of every stage in seconds at speed 1, the sums over the layers of the group that it holds, and how
    fast each rank is.

    Raises ProfileError or PartitionError when the three do not belong together.
    """
    check_fit(profile, partition, schedule)
    groups = [
        [profile.layers[layer] for layer in partition.layers_of(group)] for group in schedule.layer_group_of_stage
    ]
    return Costs(
        F=[math.fsum(layer.forward for layer in group) for group in groups],
        I=[math.fsum(layer.input_grad for layer in group) for group in groups],
        W=[math.fsum(layer.weight_grad for layer in group) for group in groups],
        hop=profile.hop,
        speed=profile.speeds_for(schedule.ranks) or 1.0,
    )


def check_fit(profile: Profile, partition: Partition, schedule: Schedule) -> None:
    """Raises ProfileError or PartitionError when the three do not belong together."""
    check_layers(profile, partition.layers)
    if partition.parts != schedule.num_layer_groups:
        raise PartitionError(
            f"the partition has {partition.parts} parts, schedule {schedule.name!r} needs "
            f"{schedule.num_layer_groups}; cut the layers for this schedule, these ranks and stages_per_rank"
        )


def check_layers(profile: Profile, layers: int) -> None:
    """Raises ProfileError when the profile was not measured on this many layers."""
    if len(profile.layers) != layers:
        raise ProfileError(f"the profile has {len(profile.layers)} layers, the model {layers}; {REMEDY}")

"""Which layers are faster in bf16 than in the type that they have of themselves, as measured before the first step."""

from __future__ import annotations

import torch

from partition import Profile
from pipeline.batch import Item
from pipeline.config import PipelineConfig
from pipeline.layer import RandomSource
from pipeline.mesh import Mesh
from pipeline.module import PipelineModule
from pipeline.planning import item_of_first, profile_on
from pipeline.precision.types import types_of
from schedules import Schedule

__all__ = ["faster_in_bf16"]

_LEAST_GAIN = 0.1


def faster_in_bf16(
    config: PipelineConfig,
    module: PipelineModule,
    mesh: Mesh,
    schedule: Schedule,
    random: RandomSource,
    item: Item | None,
    measured: Profile,
) -> tuple[int, ...]:
    """Layers with parameters that ``precision`` leaves as they are, or has in fp32, and that take less time in bf16.

    Collective.  ``item`` is the micro-batch that ``measured`` is of, on the rank of the first stage.  None are found
    where there is no such micro-batch, or where layers are not built in fp32, which those around would be cast to.
    """
    types = types_of(config.precision, module)
    whole = item_of_first(item, mesh, schedule)
    free = [layer for layer, dtype in enumerate(types) if dtype in (None, torch.float32)]
    single = all(measured.layers[n].parameter_bytes == 4 * measured.layers[n].parameters for n in free)
    if whole is None or not free or not single:
        return ()
    below = config.model_copy(update={"precision": (*config.precision, *((str(layer), "bf16") for layer in free))})
    found = profile_on(whole, below, module, mesh, random).layers

    def faster(layer: int) -> bool:
        before, after = measured.layers[layer], found[layer]
        return before.parameters > 0 and after.seconds < (1 - _LEAST_GAIN) * before.seconds

    return tuple(filter(faster, free))

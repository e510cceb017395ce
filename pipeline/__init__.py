"""Pipeline-parallel training: a model as a list of layers, a schedule by name, an engine that runs both.

Names are imported when they are first used, so that the command line draws timelines without waiting for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.batch import split_batch
    from pipeline.config import PipelineConfig
    from pipeline.engine import Engine
    from pipeline.links.local import run_local
    from pipeline.losses import add_loss
    from pipeline.module import LayerSpec, PipelineModule, TiedLayerSpec
    from pipeline.start import initialize

__all__ = [
    "Engine",
    "LayerSpec",
    "PipelineConfig",
    "PipelineModule",
    "TiedLayerSpec",
    "add_loss",
    "initialize",
    "run_local",
    "split_batch",
]

_MODULE_OF = {
    "Engine": "pipeline.engine",
    "LayerSpec": "pipeline.module",
    "PipelineConfig": "pipeline.config",
    "PipelineModule": "pipeline.module",
    "TiedLayerSpec": "pipeline.module",
    "add_loss": "pipeline.losses",
    "initialize": "pipeline.start",
    "run_local": "pipeline.links.local",
    "split_batch": "pipeline.batch",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value  # the next use finds it without coming here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

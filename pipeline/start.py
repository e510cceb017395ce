"""The start of a run: settings checked, ranks arranged, and the engine made of both."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from partition import Profile
from pipeline.build import ParamGroups
from pipeline.config import PipelineConfig
from pipeline.device import set_threads
from pipeline.engine import Engine
from pipeline.errors import ConfigError, ModelError, TrainingWarning
from pipeline.gradients.allocator import keep_freed_memory
from pipeline.module import PipelineModule
from pipeline.planning import mesh_for
from pipeline.setting_types import did_you_mean
from pipeline.update import MakeOptimizer, MakeScheduler

__all__ = ["initialize"]


def initialize(
    module: PipelineModule,
    *,
    config: PipelineConfig | Mapping[str, Any] | str | Path | None = None,
    optimizer: MakeOptimizer | None = None,
    lr_scheduler: MakeScheduler | None = None,
    param_groups: ParamGroups | None = None,
    profile: Profile | None = None,
) -> Engine:
    """Make an engine on every rank that is to take part.  Collective.

    Parameters
    ----------
    module:
        The model, the same on every rank.
    config:
        A ``PipelineConfig``, a mapping of settings, or the path of a TOML, YAML or JSON file.
    optimizer:
        A ``torch.optim`` class, or a function that takes a list of parameter groups and returns an optimizer.  It is
        called once on each rank with the same groups in the same order, ``params`` possibly empty; they hold flat
        vectors, so that the optimizer must be element-wise.  Without one the engine can only evaluate.
    lr_scheduler:
        A function of the optimizer that returns a learning-rate scheduler, stepped after every update.
    param_groups:
        ``param_groups(name, shape)`` returns the optimizer settings of a parameter, ``{"weight_decay": 0.0}`` for
        example; parameters with equal settings share a group.
    profile:
        Measured costs of the layers; otherwise they are taken from the file ``config.profile``, or measured on the
        first micro-batch where ``config.partition`` asks for them.

    Raises ``ConfigError``, ``WorldSizeError``, ``PlanMismatch``, ``ModelError`` and the errors of ``schedules`` and
    ``partition`` when these cannot be trained together, before anything is built.
    """
    if not isinstance(module, PipelineModule):
        raise ModelError(
            f"initialize takes a PipelineModule, not a {type(module).__name__}; make one of a list of layers, or of an "
            "nn.Sequential, and of a loss: PipelineModule(layers, loss_fn)"
        )
    if optimizer is not None and not callable(optimizer):
        raise ConfigError(
            f"optimizer is a {type(optimizer).__name__} that exists already; give its class, or a function that makes "
            "one, since each rank makes its own for what it holds: lambda groups: torch.optim.SGD(groups, lr=0.1)"
        )
    settings = PipelineConfig.load(config)
    _settle(settings)
    if profile is None and settings.profile is not None:
        profile = Profile.load(settings.profile)
    engine = Engine(
        module,
        settings,
        mesh_for(settings, profile),
        optimizer,
        lr_scheduler,
        param_groups,
        profile,
    )
    if settings.save_to is not None:
        _stop_on_sigterm(engine)
        _resume(engine)
    return engine


def _settle(settings: PipelineConfig) -> None:
    """Check and do what concerns the whole process."""
    _require_compiler(settings.compile)
    set_threads(settings.threads)
    if settings.keep_freed_memory:
        keep_freed_memory()


def _resume(engine: Engine) -> None:
    """Go on from the newest checkpoint, where that is set, or torchrun has started this in place of what failed."""
    here = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    goes_on = engine.config.resume or any(engine.mesh.world.all_gather_object(here))  # hosts count each for itself
    if goes_on and engine.resume() is None and engine.mesh.rank == 0:
        text = f"there is no checkpoint in {engine.config.save_to} yet: training begins anew"
        warnings.warn(text, TrainingWarning, stacklevel=3)


def _stop_on_sigterm(engine: Engine) -> None:
    """A signal to end makes the step come to its end, and a checkpoint be written, unless the program handles it."""
    here = threading.current_thread() is threading.main_thread()
    if here and signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, None):
        signal.signal(signal.SIGTERM, lambda *_: engine.request_stop())


def _require_compiler(name: str) -> None:
    if name == "none":
        return
    known = ["none", *torch.compiler.list_backends(None)]
    if name not in known:
        raise ConfigError(f"compile = {name!r} is no backend of torch.compile; {did_you_mean(name, known)}")

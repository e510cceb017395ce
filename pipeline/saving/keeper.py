"""What an engine does about checkpoints: saves when told or when due, loads, and keeps what is registered."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple, Protocol

import torch

from partition import Profile
from pipeline.config import PipelineConfig
from pipeline.entries import kept, shapes
from pipeline.errors import CheckpointError, ConfigError, TrainingWarning
from pipeline.mesh import Mesh
from pipeline.precision.loss_scale import LossScale
from pipeline.runner import Runner
from pipeline.saving.due import Due
from pipeline.saving.manifest import Manifest
from pipeline.saving.opening import Opened, open_checkpoint, require_fit, restore
from pipeline.saving.saver import Contents, Saver

__all__ = ["Keeper", "Progress", "Stateful"]


class Stateful(Protocol):
    """Whatever has a state to be saved, as torch's optimizers, schedulers and data loaders have."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


class Progress(NamedTuple):
    """How far training has come, beside the values of the model and the optimizer."""

    steps: int
    items: int  # of its iterator that each data-parallel rank has trained on
    loss_scale: LossScale | None
    losses: tuple[float, ...]  # of the last steps, by which spikes are told
    precision: dict[str, Any]  # which layers have other types than at first, and why


class Keeper:
    """One for each engine; every rank calls the same in the same order."""

    def __init__(self, config: PipelineConfig, mesh: Mesh) -> None:
        self.follow(config, mesh)
        self._things: dict[str, Stateful] = {}
        self._waiting: Mapping[str, list[Any]] = {}  # loaded, for what has not been registered yet
        self.saver = Saver(mesh)

    def follow(self, config: PipelineConfig, mesh: Mesh) -> None:
        """Go by these settings, and with the ranks arranged so."""
        self._config = config
        self._mesh = mesh
        self._due = Due(config.save_every, config.save_failure_hours)

    def register(self, name: str, thing: Stateful) -> None:
        """Save and load the state of an object with every checkpoint, under a name."""
        if not all(callable(getattr(thing, method, None)) for method in ("state_dict", "load_state_dict")):
            raise ConfigError(
                f"a {type(thing).__name__} has no state_dict and load_state_dict; register an object that has both"
            )
        self._things[name] = thing
        if name in self._waiting:
            self._give(name, self._waiting[name])

    # -- saving ----------------------------------------------------------------------------------------------

    def due(self, steps: int) -> bool:
        """Whether this rank, which is asked before the end of a step, wants a checkpoint after it: rank 0 decides."""
        wanted = self._config.save_to is not None and self._mesh.rank == 0
        return wanted and self._due.after(steps, self.saver.busy)

    def save(
        self, directory: str | Path | None, runner: Runner, progress: Progress, profile: Profile | None, *, wait: bool
    ) -> Path:
        """Write a checkpoint.  Collective."""
        where = self._folder(directory)
        contents = self._contents(runner, progress, profile)
        path = self.saver.save(where, contents, keep=self._config.save_keep, wait=wait)
        self._due.saved(self.saver.stall, self.saver.seconds)
        return path

    def tell(self) -> None:
        """Say that a checkpoint could not be written while training went on."""
        problem = self.saver.problem()
        if problem and self._mesh.rank == 0:
            warnings.warn(f"{problem}; training goes on, earlier checkpoints are whole", TrainingWarning, stacklevel=4)

    def _folder(self, given: str | Path | None) -> Path:
        directory = self._config.save_to if given is None else Path(given)
        if directory is None:
            raise ConfigError("there is no folder of checkpoints: give one, or set save_to")
        return directory

    def _contents(self, runner: Runner, progress: Progress, profile: Profile | None) -> Contents:
        updater, mesh = runner.update, self._mesh
        manifest = Manifest(
            steps=progress.steps,
            layers=runner.plan.partition.cuts[-1],
            seed=self._config.seed,
            optimizer=None if updater is None else type(updater.optimizer).__name__,
            groups=0 if updater is None else len(updater.optimizer.param_groups),
        )
        values = {
            "items": progress.items,
            "micro_batches": runner.plan.micro_batches,
            "losses": progress.losses,
            "precision": progress.precision,
            "loss_scale": None if progress.loss_scale is None else asdict(progress.loss_scale),
            "groups": None if updater is None else updater.settings(),
            "scheduler": None if updater is None or updater.scheduler is None else updater.scheduler.state_dict(),
            "registered": self._states(),
        }
        header = BytesIO()
        torch.save(values, header)
        header.seek(0)
        try:
            torch.load(header, weights_only=True)
        except UnpicklingError as error:
            raise CheckpointError(
                "what the learning-rate scheduler or something registered gives as its state cannot be loaded safely "
                f"again; let it give tensors, numbers, text, and lists or dicts of these: {error}"
            ) from error
        return Contents(kept(runner, mesh.data_rank, mesh.data), shapes(runner), manifest, header.getvalue(), profile)

    def _states(self) -> dict[str, list[Any]]:
        """The states of what is registered, one of each data-parallel rank.  Collective where something is."""
        if not self._things:
            return {}
        mine = {name: thing.state_dict() for name, thing in self._things.items()} if self._mesh.pipe_rank == 0 else {}
        told = [states for states in self._mesh.world.all_gather_object(mine) if states]
        return {name: [states[name] for states in told] for name in self._things}

    # -- loading ---------------------------------------------------------------------------------------------

    def open(self, path: str | Path | None, layers: int) -> Opened | None:
        """The checkpoint to go on from, of a model of so many layers, None where there is none.  Collective."""
        self.saver.settle()
        opened = open_checkpoint(self._folder(path), self._mesh)
        if opened is not None and opened.manifest.layers != layers:
            raise CheckpointError(
                f"{opened.path} does not fit: it is of {opened.manifest.layers} layers, and the model has {layers}"
            )
        return opened

    def restore(self, opened: Opened, runner: Runner) -> Progress:
        """Fill the model, the optimizer and what is registered from a checkpoint.  Collective.

        Raises ``CheckpointError`` on every rank, before anything is changed, when it is of another model or optimizer.
        """
        require_fit(opened, runner, self._mesh)
        header, states = opened.header, opened.header["registered"]
        for name in self._things.keys() & states.keys():
            self._own(name, states[name])
        restore(opened, runner)
        if runner.update is not None and header["groups"] is not None:
            runner.update.restore(header["groups"], header["scheduler"])
        self._waiting = states
        for name in self._things.keys() & states.keys():
            self._give(name, states[name])
        scale = header["loss_scale"]
        scale = None if scale is None else LossScale(**scale)
        return Progress(opened.manifest.steps, header["items"], scale, header["losses"], header["precision"])

    def _give(self, name: str, states: list[Any]) -> None:
        self._things[name].load_state_dict(self._own(name, states))

    def _own(self, name: str, states: list[Any]) -> Any:
        """The state that this rank's object had."""
        if len(states) == self._mesh.data:
            return states[self._mesh.data_rank]
        raise CheckpointError(
            f"the state of {name!r} was saved by {len(states)} data-parallel ranks, and there are {self._mesh.data}: "
            f"set data_parallel to {len(states)}, or do not register it and place it by engine.items"
        )

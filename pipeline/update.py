"""The end of a step: norms, clipping, and the optimizer on flat vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeline.build import BuiltLayers
from pipeline.errors import ConfigError
from pipeline.stretches import Stretch
from pipeline.ties import Role

__all__ = ["MakeOptimizer", "MakeScheduler", "Updater", "clipping_factor", "squared_norms"]

MakeOptimizer = Callable[[list[dict[str, Any]]], Optimizer]
MakeScheduler = Callable[[Optimizer], Any]

_EPSILON = 1e-6  # keeps the clipping factor finite, as in torch.nn.utils.clip_grad_norm_


class Updater:
    """The optimizer of one rank.

    It holds one flat parameter for each stretch of a layer's vector that belongs to one optimizer group: for an
    element-wise optimizer the same update as on the parameters one by one.  For others, each stretch is a parameter.
    What ``before``, that of another layout, had of stretches that have stayed is taken on.
    """

    def __init__(
        self,
        built: BuiltLayers,
        make_optimizer: MakeOptimizer,
        make_scheduler: MakeScheduler | None,
        before: Updater | None = None,
    ) -> None:
        groups: list[dict[str, Any]] = [{"params": [], **settings} for settings in built.groups]
        self.flat: list[tuple[Stretch, nn.Parameter]] = []
        for stretch in built.stretches(Role.OWNER, Role.COPY):
            flat = nn.Parameter(stretch.parameters)
            groups[stretch.group]["params"].append(flat)
            self.flat.append((stretch, flat))
        _refuse(make_optimizer, built.uncut)
        self.optimizer = make_optimizer(groups)
        _refuse(type(self.optimizer), built.uncut)
        if not isinstance(self.optimizer, Optimizer):
            raise ConfigError(
                f"optimizer made a {type(self.optimizer).__name__}; give a torch.optim class, or a function that takes "
                "a list of parameter groups and returns an optimizer"
            )
        held = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        missing = sum(id(flat) not in held for _, flat in self.flat)
        if missing:
            raise ConfigError(
                f"the optimizer has {missing} of {len(self.flat)} parameter vectors of this rank not in its groups, so "
                "that nothing would train them; give it all the groups that the function gets, and set requires_grad "
                "to False on parameters that are to stay as they are"
            )
        self.scheduler = make_scheduler(self.optimizer) if make_scheduler else None
        self.fresh = self.flat
        """Those whose state is not taken on."""
        if before is not None:
            self._go_on(before)

    def _go_on(self, before: Updater) -> None:
        stayed = {(s.parameters.data_ptr(), s.parameters.numel()): flat for s, flat in before.flat}
        self.fresh = []
        for stretch, flat in self.flat:
            old = stayed.get((stretch.parameters.data_ptr(), stretch.parameters.numel()))
            if old is None:
                self.fresh.append((stretch, flat))
            elif old in before.optimizer.state:
                self.optimizer.state[flat] = before.optimizer.state[old]
        scheduler = None if before.scheduler is None else before.scheduler.state_dict()
        self.restore(before.settings(), scheduler)

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients of this rank, in place."""
        for stretch, _ in self.flat:
            stretch.gradients.mul_(factor)

    def step(self) -> None:
        """Update the parameters, then the learning-rate schedule."""
        for stretch, flat in self.flat:
            flat.grad = stretch.gradients.to(flat.dtype)  # the same tensor where the types agree
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    def settings(self) -> list[dict[str, Any]]:
        """The settings of each group, as they are now."""
        return [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]

    def restore(self, settings: Sequence[dict[str, Any]], scheduler: dict[str, Any] | None) -> None:
        """Set the groups' settings and the learning-rate schedule to what was saved."""
        for group, saved in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(saved)
        if self.scheduler is not None and scheduler is not None:
            self.scheduler.load_state_dict(scheduler)


_NEEDS_SHAPES = ("Adafactor", "Muon")


def _refuse(make_optimizer: Any, uncut: bool) -> None:
    """Raise ``ConfigError`` for an optimizer that cannot do its work on what it would be handed."""
    while isinstance(make_optimizer, partial):
        make_optimizer = make_optimizer.func
    name = getattr(make_optimizer, "__name__", "") if isinstance(make_optimizer, type) else ""
    if name in _NEEDS_SHAPES and not uncut:
        raise ConfigError(
            f"{name} works on whole matrices, but is handed vectors of many parameters; set optimizer_view = "
            '"parameters"'
        )
    if name == "LBFGS":
        raise ConfigError(
            "LBFGS runs the model itself, several times a step, and couples all parameters, which are on different "
            "ranks; use an optimizer that steps on given gradients"
        )


def squared_norms(stretches: Sequence[Stretch], layers: int) -> list[Tensor | float]:
    """The squared norm of each layer's gradients, 0 for layers without; nothing waits for the device."""
    norms: list[Tensor | float] = [0.0] * layers
    for stretch in stretches:
        norms[stretch.layer] = norms[stretch.layer] + torch.linalg.vector_norm(stretch.gradients).double() ** 2
    return norms


def clipping_factor(norm: float, limit: float | None) -> float:
    """What gradients of this norm are to be multiplied by so that their norm is at most ``limit``."""
    return 1.0 if limit is None or norm <= limit else limit / (norm + _EPSILON)

"""Every error that the pipeline package raises on purpose."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "Aborted",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "EndOfData",
    "FormVaried",
    "GradientError",
    "LayerError",
    "LinkError",
    "LossError",
    "LossSpike",
    "MessageMismatch",
    "ModelError",
    "NonFiniteLoss",
    "NotPlanned",
    "PipelineError",
    "PlanMismatch",
    "RankDied",
    "StateError",
    "StepFailed",
    "TrainingStopped",
    "TrainingWarning",
    "TransferDeadlock",
    "TransferTimeout",
    "WorldSizeError",
]


class PipelineError(Exception):
    """Base of them all."""


# -- what was asked for --------------------------------------------------------------------------------------


class ConfigError(PipelineError, ValueError):
    """A setting, or a combination of settings, that cannot be run."""


class WorldSizeError(ConfigError):
    """The number of ranks does not fit the settings."""


class ModelError(PipelineError, ValueError):
    """A list of layers that cannot be trained."""


class DataError(PipelineError, ValueError):
    """A batch or an item of an unexpected form."""


class LossError(PipelineError, ValueError):
    """A loss function that does not return a scalar tensor."""


class NotPlanned(PipelineError):
    """Asked for what only a Plan can tell, before the first micro-batch has made one."""


class PlanMismatch(PipelineError):
    """Two ranks run different code, settings or models."""


# -- what happened in a step ---------------------------------------------------------------------------------


class CheckpointError(PipelineError):
    """A checkpoint that cannot be written or read, or that belongs to another model."""


class StateError(PipelineError, ValueError):
    """Values that do not fit the model they are to be loaded into, or that ranks do not have in common."""


class EndOfData(PipelineError):
    """The iterator had no item left for this step."""


class LayerError(PipelineError):
    """A layer did what no layer may do."""


class GradientError(PipelineError):
    """A gradient was lost or replaced."""


class LossSpike(PipelineError):
    """A loss is far above those of the steps before it."""


class NonFiniteLoss(PipelineError):
    """The loss is infinite or not a number."""


class FormVaried(PipelineError):
    """What enters a stage does not have the form that ranks had agreed on; the engine runs the step again."""

    def __init__(self, stage: int) -> None:
        super().__init__(stage)
        self.stage = stage

    def __str__(self) -> str:
        return f"the input of stage {self.stage} does not have the form that it had for inputs of the same shapes"


class TrainingStopped(SystemExit):
    """Training has been asked to stop and is over; a loop that does not look at ``should_stop`` ends by it."""


class TrainingWarning(UserWarning):
    """Training goes on, but not well; told once, on rank 0."""


class StepFailed(PipelineError):
    """A layer raised on one rank; raised on all ranks at the end of the step, which changed nothing."""

    def __init__(self, rank: int, layer: str, action: str, message: str) -> None:
        super().__init__(rank, layer, action, message)
        self.rank = rank
        self.layer = layer
        self.action = action
        self.message = message

    def __str__(self) -> str:
        where = f" in layer {self.layer}" if self.layer else ""
        return f"rank {self.rank} failed in {self.action}{where}: {self.message}"


# -- what happened between ranks -----------------------------------------------------------------------------


class LinkError(PipelineError):
    """A transfer or a collective that did not happen; after it the ranks cannot go on together."""


class TransferTimeout(LinkError):
    """A peer did not do its part in time.  ``peer`` and ``lane`` are None for a collective."""

    def __init__(self, rank: int, peer: int | None, lane: int | None, what: str, seconds: float) -> None:
        super().__init__(rank, peer, lane, what, seconds)
        self.rank = rank
        self.peer = peer
        self.lane = lane
        self.what = what
        self.seconds = seconds

    def __str__(self) -> str:
        return (
            f"rank {self.rank} waited {self.seconds:g} s {self.what}; "
            f"if that is how long a step may take, raise timeout above {self.seconds:g}"
        )


class RankDied(LinkError):
    """The connection to a peer is gone.  ``peer`` is None when a collective cannot tell whose."""

    def __init__(self, rank: int, peer: int | None, lane: int | None, what: str) -> None:
        super().__init__(rank, peer, lane, what)
        self.rank = rank
        self.peer = peer
        self.lane = lane
        self.what = what

    def __str__(self) -> str:
        lost = "another rank" if self.peer is None else f"rank {self.peer}"
        return (
            f"rank {self.rank} waited {self.what}, but {lost} is gone: "
            "it has ended or given up, and its own output says why"
        )


class MessageMismatch(LinkError):
    """A rank sent something else than what its peer had posted, or ranks met in different collectives."""


class TransferDeadlock(LinkError):
    """Every rank waits for another one."""

    def __init__(self, waits: Sequence[str]) -> None:
        super().__init__(tuple(waits))
        self.waits = tuple(waits)

    def __str__(self) -> str:
        return "no rank can go on: " + "; ".join(self.waits)


class Aborted(LinkError):
    """Another rank of this process raised; that error is the one to read."""

    def __init__(self, rank: int, failed: int) -> None:
        super().__init__(rank, failed)
        self.rank = rank
        self.failed = failed

    def __str__(self) -> str:
        cause = f"rank {self.failed} raised" if self.failed >= 0 else "run_local was interrupted"
        return f"rank {self.rank} was stopped, because {cause}"

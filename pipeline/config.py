"""PipelineConfig: the settings of a training run, checked as a whole before anything starts."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from partition.sizes import numbers_of
from pipeline.errors import ConfigError
from pipeline.guard import Remedy
from pipeline.setting_sources import Arguments, Source, add_flags, merge, read_flags, read_source
from pipeline.setting_types import (
    BytesSetting,
    LossScaleSetting,
    MicroBatchSetting,
    PartitionSetting,
    PrecisionSetting,
    RecomputeSetting,
    SaveEverySetting,
    ScheduleOption,
    explain,
)

__all__ = ["PipelineConfig"]


class PipelineConfig(BaseModel):
    """Everything that is chosen for a training run; frozen, and equal on every rank."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    # What runs when
    schedule: str = "1f1b"
    """Name of the schedule; `pipeloom schedules` lists them."""

    schedule_options: Mapping[str, ScheduleOption] = {}
    """Options of the schedule by name, as `pipeloom schedules` lists them; on the command line name=value."""

    stages_per_rank: int | None = Field(None, ge=1)
    """Stages that each rank holds; without it the schedule's own number."""

    micro_batches: int = Field(8, ge=1)
    """Micro-batches in one step of one data-parallel rank; each is one item of its iterator, unless global_batch says
    otherwise. Where micro_batch is set it follows from that."""

    global_batch: int | None = Field(None, ge=1)
    """Rows in one step of all data-parallel ranks together. Items of the iterator may then be of any size: each rank
    takes as many as hold its part of the rows, which are cut into micro-batches."""

    micro_batch: MicroBatchSetting | None = None
    """Rows in one micro-batch, or auto: the size with the shortest predicted step that memory_limit allows, for which
    layers are timed at two sizes before the first step."""

    data_parallel: int = Field(1, ge=1)
    """Copies of the whole pipeline; pipeline ranks = world size / data_parallel."""

    zero: int = Field(0, ge=0, le=3)
    """What data-parallel ranks hold in parts instead of whole: nothing (0), optimizer state (1), gradients as well (2),
    parameters as well (3)."""

    mesh_inside: Literal["auto", "pipe", "data"] = "auto"
    """Which ranks lie side by side, on one node as far as they fit there: those of a pipeline, those that hold the same
    stages (data), or auto, which on several nodes takes those that send each other more, by the profile if one is
    given."""

    ranks_per_node: int | None = Field(None, ge=1)
    """Ranks on each node; without it as many as the launcher has started there."""

    optimizer_view: Literal["vectors", "parameters"] = "vectors"
    """What the optimizer is handed: vectors of many parameters, which is all that an element-wise one needs, or single
    parameters in their own shapes, each whole on one data-parallel rank, for those that work on matrices."""

    zero_reduce_every: Literal["micro_batch", "step"] = "micro_batch"
    """When ZeRO 2 and 3 sum gradients: layer by layer behind every micro-batch, so that none is ever whole but the one
    at hand, or once a step, which sends half as much or less and keeps whole gradients until then."""

    zero_whole_layers: int = Field(2, ge=1)
    """Layers of a stage whose parameters ZeRO 3 has whole at once: those in use and those fetched ahead. A stage of no
    more layers stays whole from pass to pass as long as its rank runs no other."""

    # How replicas exchange
    comm_gradients: Literal["auto", "flat", "hierarchical"] = "auto"
    """How ranks that hold the same stages sum gradients: all of them at once (flat), inside of each node, then between
    nodes on parts, and inside again (hierarchical), or the way that is measured to be faster for the size at hand."""

    comm_parameters: Literal["auto", "flat", "hierarchical"] = "auto"
    """The same, for gathering parameters."""

    comm_states: Literal["auto", "flat", "hierarchical"] = "auto"
    """The same, for running statistics and other buffers of layers."""

    comm_compress: Literal["none", "bf16", "powersgd", "topk"] = "none"
    """What gradients are summed as, over slow links and with ZeRO 0 or 1: as they are, in bf16, as products of thin
    matrices, or their largest elements alone. Weights then differ from those of an exact sum."""

    comm_rank: int = Field(8, ge=1)
    """Columns of the thin matrices of powersgd."""

    comm_share: float = Field(0.05, gt=0, le=1)
    """Share of the elements that topk sends."""

    comm_error_feedback: bool = True
    """Add what compression has left out of one step to the gradients of the next. It takes the memory of gradients."""

    comm_exact_steps: int = Field(0, ge=0)
    """Steps at the start, and after a checkpoint has been loaded, of which gradients are not compressed yet."""

    # What runs where
    partition: PartitionSetting = "profile"
    """Where the layer list is cut: profile (equal measured time), parameters (equal parameter count), uniform
    (equal number of layers), type:REGEX (equal number of matching layers), or cut points as in 0,3,7."""

    profile: Path | None = None
    """File with a saved Profile, to be used instead of timing the layers before the first step."""

    profile_runs: int = Field(5, ge=1)
    """Timed runs of each layer when the layers are profiled; the median counts."""

    # What is computed
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the initial weights and of everything random in the layers."""

    precision: PrecisionSetting = ()
    """Type in which layers compute: as_built, fp32, bf16 or fp16, or a type for each pattern of layers, the last that
    matches counting, as in {"*": "bf16", "*norm*": "fp32"}. Patterns match types of layers, keys of tied ones, and
    numbers. Weights of 16 bits have a copy in fp32, which the optimizer steps on."""

    precision_overflows: int | None = Field(None, ge=0)
    """A layer in fp16 whose gradients are the first to overflow more often than this within precision_window steps
    computes in fp32 for precision_rest steps. Without it none does."""

    precision_window: int = Field(100, ge=1)
    """Steps in which overflows of a layer are counted."""

    precision_rest: int = Field(500, ge=1)
    """Steps in which such a layer computes in fp32."""

    precision_lower: bool = False
    """Let layers compute in bf16 that have no type of their own and are measured to be faster so, by a tenth at least,
    from the first precision_window steps without an overflow on."""

    loss_scale: LossScaleSetting = "dynamic"
    """Factor by which losses are multiplied before their backward where a layer computes in fp16: a number, or dynamic,
    which halves when gradients overflow, and such a step is skipped, and doubles after enough that do not."""

    loss_scale_initial: float = Field(2.0**16, gt=0)
    """The dynamic scale of the first step."""

    loss_scale_window: int = Field(1000, ge=1)
    """Steps without overflow after which the dynamic scale doubles."""

    loss_scale_hysteresis: int = Field(2, ge=1)
    """Overflows until the dynamic scale halves: all but the last only skip their step."""

    loss_scale_minimum: float = Field(1.0, gt=0)
    """What the dynamic scale never falls below; an overflow there is an error unless nonfinite_loss = "ignore"."""

    gradient_clipping: float | None = Field(None, gt=0)
    """Largest norm of all gradients together; longer ones are scaled down to it. Without it none are."""

    nonfinite_loss: Remedy = "raise"
    """What is done about a loss or gradients that are infinite or not a number: raise an error, skip the step, rollback
    to the newest checkpoint in save_to and go on with the next data, or ignore it."""

    loss_spike: Remedy = "ignore"
    """The same, about a loss that is far above those of the last 50 steps."""

    loss_spike_size: float = Field(20.0, gt=1)
    """How many times as far above their median as they lie from it."""

    loss_attempts: int = Field(5, ge=1)
    """How often steps are skipped or rolled back, without a later one that is well, before there is an error."""

    reference_numerics: bool = False
    """Accumulate gradients exactly as plain PyTorch does, to the last bit; slower."""

    weight_grad_batching: bool = False
    """Where a schedule has several W of a stage side by side, compute them as one product. Results then agree with
    those of other layouts to rounding, and no longer in every bit."""

    recompute: RecomputeSetting = "none"
    """Layers that keep only their input and run forward again before their backward: none, every, every:N (each N-th),
    layer numbers as in 0,2,5, or auto, the layers with which every rank keeps within memory_limit at the least cost."""

    memory_limit: BytesSetting | None = None
    """Bytes of one rank for parameters, gradients, optimizer state, activations and messages together, which cuts by
    measured costs keep to, recompute = "auto" and micro_batch = "auto": a number, or one with a unit as in 8GiB."""

    balance: Literal["off", "report", "on"] = "off"
    """Whether layers move between ranks while training runs, when ranks have become unevenly busy: never, only a note
    of what would move, or yes."""

    balance_micro_batch: Literal["off", "auto"] = "off"
    """Whether the size of micro-batches changes while training runs, for the same global_batch, when layers cost
    otherwise than at first; memory_limit holds for it too, where the layers have been timed before."""

    balance_window: int = Field(5, ge=2)
    """Steps that must show that a move pays."""

    balance_gain: float = Field(0.05, gt=0, lt=1)
    """Smallest share of a step for which layers move."""

    balance_horizon: int = Field(200, ge=1)
    """Steps in which a move must have paid for the time that it takes."""

    # What is kept
    save_to: Path | None = None
    """Folder of checkpoints, in which all ranks must see the same files: save_every writes into it, a run that SIGTERM
    ends does, and one that is started again goes on from it."""

    save_every: SaveEverySetting = "never"
    """How often a checkpoint is written while training goes on: never, after so many steps or so much time as in
    "100 steps" or "10 minutes", or auto, which loses the least time by what saving was measured to cost and
    save_failure_hours."""

    save_failure_hours: float = Field(24.0, gt=0)
    """Mean time between failures of the whole run, for save_every = "auto"."""

    save_keep: int | None = Field(None, ge=1)
    """Newest checkpoints that are left in the folder when one has been written; without it all are."""

    resume: bool = False
    """Go on from the newest whole checkpoint in save_to, if there is one. A run that torchrun has restarted always
    does."""

    # How it runs
    device: str = "auto"
    """Type of the device of each rank; auto takes an accelerator where there is one."""

    threads: int = Field(1, ge=1)
    """Threads inside an operator, on each rank. Results are the same bits only for the same number."""

    link: Literal["auto", "shm", "gloo"] = "auto"
    """How messages in host memory go between the processes of one host: shm (through memory that they share, up to
    1 MiB each), gloo (through sockets), or auto, which takes shm where the machine can."""

    receive_ahead: int = Field(2, ge=0)
    """Receives posted before they are needed, on each channel from one rank to another."""

    compile: str = "none"
    """Backend of torch.compile for the layers, each compiled by itself: inductor, for example, or none. The gradients
    of a compiled layer's weights are all computed in I, and nothing of it is left to W."""

    keep_freed_memory: bool = False
    """Keep freed host memory in the process for the next micro-batch, where the C library can: fewer page faults
    between I and W. It holds for the whole process and for good, whose resident memory stays at its peak."""

    timeout: float = Field(300.0, gt=0)
    """Seconds that a rank waits for another before all report what they wait for, and stop."""

    if not TYPE_CHECKING:  # type checkers see the keywords that pydantic makes from the fields

        def __init__(self, **settings: Any) -> None:
            try:
                super().__init__(**settings)
            except ValidationError as error:
                raise ConfigError(explain(error, type(self))) from None

    @model_validator(mode="after")
    def _agree(self) -> PipelineConfig:
        if self.weight_grad_batching and self.reference_numerics:
            raise ConfigError(
                "weight_grad_batching sums over several micro-batches in one product, which plain PyTorch does not, so "
                "that it contradicts reference_numerics; set one of the two to false"
            )
        if self.recompute == "auto" and self.memory_limit is None:
            raise ConfigError(
                'recompute = "auto" chooses layers so that each rank keeps within memory_limit: set it too, as in '
                'memory_limit = "8GiB"'
            )
        self._settle_sizes()
        if self.comm_compress != "none":
            self._allow_compression()
        if self.save_to is None and (self.save_every != "never" or self.resume):
            name = "resume" if self.resume else "save_every"
            raise ConfigError(f"{name} needs a folder of checkpoints: set save_to, as in save_to = \"checkpoints\"")
        if self.save_to is None and "rollback" in (self.nonfinite_loss, self.loss_spike):
            name = "nonfinite_loss" if self.nonfinite_loss == "rollback" else "loss_spike"
            raise ConfigError(f'{name} = "rollback" goes back to a checkpoint: set save_to and save_every')
        return self

    @property
    def rows(self) -> int | None:
        """Rows in one step of one data-parallel rank, where they are set."""
        return None if self.global_batch is None else self.global_batch // self.data_parallel

    def _settle_sizes(self) -> None:
        """Set ``micro_batches`` by what else is given."""
        if self.rows is None:
            if self.micro_batch is not None or self.balance_micro_batch != "off":
                name = "balance_micro_batch" if self.micro_batch is None else "micro_batch"
                raise ConfigError(f"{name} is about how many rows a step has: set global_batch, as in 64")
            return
        if self.global_batch is not None and self.global_batch % self.data_parallel:
            raise ConfigError(
                f"global_batch = {self.global_batch} rows cannot be shared equally by data_parallel = "
                f"{self.data_parallel}; set one of them so that it divides the other"
            )
        possible = numbers_of(self.rows)
        number = self.micro_batches
        if self.micro_batch == "auto" and number not in possible:
            number = max(n for n in possible if n <= number)  # to begin with
        elif isinstance(self.micro_batch, int):
            number = max(1, self.rows // self.micro_batch)
            if number * self.micro_batch != self.rows:
                raise ConfigError(
                    f"micro_batch = {self.micro_batch} does not divide the {self.rows} rows of a data-parallel rank; "
                    f"it can be {_listed(possible)}"
                )
            if "micro_batches" in self.model_fields_set and self.micro_batches != number:
                raise ConfigError(
                    f"micro_batches = {self.micro_batches}, but {self.rows} rows of a data-parallel rank are {number} "
                    f"micro-batches of {self.micro_batch}; leave one of the two out"
                )
        if number not in possible:
            raise ConfigError(
                f"micro_batches = {number} does not divide the {self.rows} rows of a data-parallel rank; it can be "
                f"{_listed(possible)}"
            )
        self.__dict__["micro_batches"] = number  # frozen, but for what follows from the rest

    def _allow_compression(self) -> None:
        if self.zero > 1:
            raise ConfigError(
                f"comm_compress = {self.comm_compress!r} works on whole gradients, of which ZeRO {self.zero} keeps "
                "parts only; set zero to 0 or 1, or comm_compress to none"
            )
        if self.loss_scale == "dynamic" and any(kind == "fp16" for _, kind in self.precision):
            raise ConfigError(
                f"comm_compress = {self.comm_compress!r} carries what it leaves out from step to step, which a dynamic "
                "loss scale would change in between; set loss_scale to a number, precision to bf16, or comm_compress "
                "to none"
            )

    @classmethod
    def load(cls, source: Source | PipelineConfig = None, arguments: Arguments = ()) -> PipelineConfig:
        """The settings of ``source`` with those of the command line over them.

        ``source`` is a config, a mapping, the path of a TOML, YAML or JSON file, or None for the defaults.
        ``arguments`` is what follows a command, as in ``["--schedule", "gpipe"]``, or the namespace of a
        parser that went through ``add_arguments``.  Raises ``ConfigError``, which names each wrong setting.
        """
        settings = source.model_dump() if isinstance(source, PipelineConfig) else read_source(source)
        try:
            config = cls(**settings)
        except ConfigError as error:
            if isinstance(source, str | Path):
                raise ConfigError(f"{source}: {error}") from None
            raise
        flags = read_flags(cls, arguments)
        return cls(**merge(settings, flags)) if flags else config

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Give ``parser`` one option for each setting, described in its help; ``load`` takes the result."""
        add_flags(cls, parser)

    def digest(self) -> str:
        """16 hexadecimal digits, the same for equal settings in every process and on every machine."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def differences(self, other: PipelineConfig) -> tuple[str, ...]:
        """Names of the settings whose values differ, in the order in which they stand here."""
        return tuple(name for name in type(self).model_fields if getattr(self, name) != getattr(other, name))

    def __hash__(self) -> int:
        return hash(self.digest())


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))

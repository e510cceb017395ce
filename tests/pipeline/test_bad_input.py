"""What cannot be run is refused: with what was given, what is allowed and what to change; on every rank, at once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from partition.errors import FewerLayersThanStages, PartitionError
from pipeline import LayerSpec, PipelineModule, TiedLayerSpec, add_loss, initialize, run_local
from pipeline.batch import Item
from pipeline.engine import Engine
from pipeline.errors import (
    ConfigError,
    DataError,
    EndOfData,
    LossError,
    ModelError,
    NonFiniteLoss,
    NotPlanned,
    PlanMismatch,
    StepFailed,
    WorldSizeError,
)
from schedules.errors import ImpossibleShape, UnknownOption, UnknownSchedule
from tests.pipeline.models import sgd
from tests.pipeline.processes import run_processes, try_processes
from tests.pipeline.reference import Case, Layout, plainly, run

pytestmark = pytest.mark.usefixtures("double_precision")

WIDTH = 4


def items(step: int = 0, sizes: Sequence[int] = (2, 2, 2, 1)) -> list[Item]:
    """Micro-batches of random rows, with random targets."""
    generator = torch.Generator().manual_seed(step)
    return [Item(torch.randn(n, WIDTH, generator=generator), torch.randn(n, WIDTH, generator=generator)) for n in sizes]


def model(layers: int = 4, loss_fn: Any = functional.mse_loss, **others: Any) -> PipelineModule:
    return PipelineModule([LayerSpec(nn.Linear, WIDTH, WIDTH)] * layers, loss_fn, **others)


def start(module: PipelineModule | None = None, **settings: Any) -> Engine:
    given = {"micro_batches": 4, "partition": "uniform", "device": "cpu", **settings}
    return initialize(module or model(), config=given, optimizer=sgd)


def refusals(ranks: int, act: Callable[[], Any], error: type[Exception]) -> list[str]:
    """What every rank is told when all of them act, none of which must get through."""

    def worker() -> str:
        with pytest.raises(error) as caught:
            act()
        return str(caught.value)

    return run_local(worker, ranks)


def refuse(ranks: int, act: Callable[[], Any], error: type[Exception], *parts: str) -> None:
    """Every rank is told the same, and each of ``parts`` is in it."""
    told = refusals(ranks, act, error)
    assert len(set(told)) == 1
    assert all(part in told[0] for part in parts), told[0]


# -- settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "settings", "error", "message"),
    [
        (4, {"data_parallel": 3}, WorldSizeError, "4 ranks cannot form 3 pipelines of equal length"),
        (4, {"data_parallel": 3}, WorldSizeError, "set data_parallel to 1 or 2 or 4, or start 3 or 6 ranks"),
        (2, {"data_parallel": 4}, WorldSizeError, "set data_parallel to 1 or 2, or start 4 ranks"),
        (2, {"schedule": "1f2b"}, UnknownSchedule, "there is no schedule '1f2b'; did you mean '1f1b'?"),
        (2, {"schedule": "interleaved"}, UnknownSchedule, "did you mean 'interleaved-zb' or 'interleaved-1f1b'?"),
        (2, {"schedule": "xyz"}, UnknownSchedule, "set schedule to one of: 1f1b, 1f1b-eager, auto, breadth-first"),
        (
            2,
            {"schedule": "forward-only"},
            ConfigError,
            "'forward-only' has no backward; to train, set schedule to 1f1b",
        ),
        (2, {"stages_per_rank": 2}, ImpossibleShape, "set stages_per_rank to 1, or schedule to 'interleaved-1f1b'"),
        (2, {"schedule_options": {"warmth": 1}}, UnknownOption, "1f1b has no option 'warmth'"),
        (
            2,
            {"micro_batches": 0},
            ConfigError,
            "micro_batches = 0 is not possible: it must be greater than or equal to 1",
        ),
        (2, {"micro_batches": 2.5}, ConfigError, "micro_batches = 2.5 is not possible: it must be a valid integer"),
        (2, {"micro_batchs": 4}, ConfigError, "there is no setting 'micro_batchs'; did you mean 'micro_batches'?"),
        (3, {"schedule": "in-rounds"}, ImpossibleShape, "needs a multiple of ranks, not 4 with 3 ranks"),
        (3, {"schedule": "in-rounds"}, ImpossibleShape, "set micro_batches to 3 or 6"),
        (5, {}, FewerLayersThanStages, "4 layers cannot fill 5 stages"),
        (
            5,
            {"partition": "parameters"},
            FewerLayersThanStages,
            "lower the number of ranks or stages_per_rank to at most 4",
        ),
        (
            5,
            {"partition": "profile"},
            FewerLayersThanStages,
            "or set partition to cut points, which may leave stages empty",
        ),
        (3, {"schedule": "interleaved-1f1b"}, FewerLayersThanStages, "4 layers cannot fill 6 stages"),
        (2, {"partition": (1, 2, 3)}, PartitionError, "for 2 stages of 4 layers give 1 cut points from 0 to 4"),
        (2, {"partition": (9,)}, PartitionError, "for 2 stages of 4 layers give 1 cut points from 0 to 4"),
        (2, {"partition": "type:Bloc"}, PartitionError, "'type:Bloc' matches no layer"),
        (2, {"partition": "profiles"}, ConfigError, "did you mean 'profile'?"),
        (2, {"recompute": (1, 7)}, ConfigError, "recompute names layer 7, but the model has layers 0 to 3"),
        (2, {"seed": -1}, ConfigError, "seed = -1 is not possible"),
        (2, {"gradient_clipping": 0.0}, ConfigError, "gradient_clipping = 0.0 is not possible"),
        (2, {"device": "gpu"}, ConfigError, "device is 'gpu'; it must be one of auto, cpu, cuda"),
    ],
)
def test_settings_that_cannot_be_run(ranks: int, settings: Any, error: type[Exception], message: str) -> None:
    refuse(ranks, lambda: start(**settings), error, message)


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda: initialize(nn.Sequential(nn.Linear(4, 4))), ModelError, "PipelineModule(layers, loss_fn)"),
        (lambda: initialize(model(), config=7), ConfigError, "is a PipelineConfig, a mapping, or the path of"),
        (lambda: initialize(model(), config="no-such-file.toml"), ConfigError, "no-such-file.toml"),
        (lambda: initialize(model(), config={"profile": "no-such-profile.json"}), Exception, "no-such-profile.json"),
        (lambda: start_with(lambda groups: None), ConfigError, "optimizer made a NoneType; give a torch.optim class"),
        (lambda: start_with(torch.optim.SGD([torch.zeros(1)])), ConfigError, "optimizer is a SGD that exists already"),
        (lambda: start_with(of_its_own), ConfigError, "has 4 of 4 parameter vectors of this rank not in its groups"),
        (lambda: PipelineModule([], functional.mse_loss), ModelError, "the list of layers is empty"),
        (lambda: PipelineModule([nn.Linear], functional.mse_loss), ModelError, "wrap it: LayerSpec(Linear)"),
        (lambda: PipelineModule([7], functional.mse_loss), ModelError, "layer 0 is a int; a layer is a LayerSpec"),
        (lambda: LayerSpec(nn.Linear(4, 4)), ModelError, "put a module that is already built into the list as it is"),
        (lambda: model(loss_fn=nn.Linear(4, 1)), ModelError, "the loss Linear has trainable parameters"),
        (lambda: model(loss_scope="step"), ModelError, 'use loss_scope="micro_batch"'),
        (
            lambda: start(PipelineModule([LayerSpec(dict)], functional.mse_loss)),
            ModelError,
            "made a dict, not a module",
        ),
        (lambda: start(tied_unlike()), ModelError, "tied as 't', but their parameters have shapes"),
    ],
)
def test_models_and_arguments_that_cannot_be_run(act: Any, error: type[Exception], message: str) -> None:
    refuse(1, act, error, message)


def start_with(optimizer: Any) -> Engine:
    return initialize(model(), config={"partition": "uniform"}, optimizer=optimizer)


def of_its_own(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)])


def tied_unlike() -> PipelineModule:
    layers = [TiedLayerSpec("t", nn.Linear, 4, 4), TiedLayerSpec("t", nn.Linear, 4, 4, bias=False)]
    return PipelineModule(layers, functional.mse_loss)


def test_a_layer_that_cannot_be_built_names_itself() -> None:
    def worker() -> None:
        start(PipelineModule([LayerSpec(nn.Linear, 4, 4), LayerSpec(nn.Linear, 4)], functional.mse_loss))

    with pytest.raises(TypeError) as caught:
        run_local(worker, 2)
    assert "raised while layer 1 (Linear) was built" in caught.value.__notes__


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda engine: engine.full_state_dict(), "call train_batch, eval_batch or forward first"),
        (
            lambda engine: engine.save_checkpoint("nowhere"),
            "the layers are cut when the first micro-batch has been seen",
        ),
        (lambda engine: engine.plan, "or set partition to a method that needs no costs"),
        (lambda engine: engine.timeline(), "no step has run yet"),
        (lambda engine: engine.losses(), "no step has run yet"),
        (lambda engine: engine.predicted_timeline(), "the layers are cut when the first micro-batch has been seen"),
    ],
)
def test_asked_before_the_first_micro_batch(act: Any, message: str) -> None:
    refuse(2, lambda: act(start(partition="profile")), NotPlanned, message)


def test_training_without_an_optimizer() -> None:
    def act() -> None:
        initialize(model(), config={"partition": "uniform", "micro_batches": 4}).train_batch(items())

    refuse(2, act, NotPlanned, "this engine has no optimizer, so it cannot train; pass optimizer=... to initialize")


# -- losses --------------------------------------------------------------------------------------------------

LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "a vector": (lambda y, t: (y - t).square().mean(1), "it returned a tensor of shape (2,)"),
    "a matrix": (lambda y, t: (y - t).square(), "it returned a tensor of shape (2, 4)"),
    "nothing": (lambda y, t: None, "it returned NoneType"),
    "a number": (lambda y, t: (y - t).square().mean().item(), "it returned float"),
    "a complex number": (lambda y, t: functional.mse_loss(y, t) * 1j, "it returned a complex tensor of shape ()"),
    "a pair": (lambda y, t: (functional.mse_loss(y, t), 1.0), "it returned"),
}


@pytest.mark.parametrize("evaluate", [False, True], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_is_not_a_scalar(name: str, evaluate: bool) -> None:
    loss, message = LOSSES[name]

    def act() -> None:
        engine = start(model(loss_fn=loss))
        (engine.eval_batch if evaluate else engine.train_batch)(items())

    wanted = "LossError: loss_fn must return a scalar tensor, the mean over the micro-batch; "
    refuse(3, act, StepFailed, "rank 2 failed in 2F0 in layer loss: " + wanted, message)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_loss_that_depends_on_no_parameter(ranks: int) -> None:
    """Training would go on for ever, and learn nothing."""

    def act() -> None:
        start(model(loss_fn=lambda y, t: functional.mse_loss(y.detach(), t))).train_batch(items())

    refuse(
        ranks, act, LossError, "it depends on no trainable parameter; look for detach(), item(), argmax or no_grad()"
    )


def test_an_added_loss_that_is_not_a_scalar() -> None:
    class Adding(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            add_loss("balance", x)
            return super().forward(x)

    layers = [LayerSpec(nn.Linear, 4, 4), LayerSpec(Adding, 4, 4), LayerSpec(nn.Linear, 4, 4)]
    act = lambda: start(PipelineModule(layers, functional.mse_loss)).train_batch(items())  # noqa: E731
    refuse(3, act, StepFailed, "rank 1 failed in 1F0 in layer 1 (Adding): ", "add_loss('balance', ...) takes a scalar")


# -- numbers that are none -----------------------------------------------------------------------------------


class RootOfZero(torch.autograd.Function):
    """A number that is finite, with a gradient that is not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / 0.0


def spoiled(how: str) -> PipelineModule:
    """A model with running statistics, whose loss is not finite, or its gradient, where the target says so."""

    def loss(y: Tensor, targets: tuple[Tensor, bool]) -> Tensor:
        target, spoil = targets
        if spoil and how == "gradient":
            y = RootOfZero.apply(y)
        value = functional.mse_loss(y, target)
        return value * {"nan": float("nan"), "inf": float("inf"), "gradient": 1.0}[how] if spoil else value

    layers = [LayerSpec(nn.Linear, 4, 4), LayerSpec(nn.BatchNorm1d, 4), LayerSpec(nn.Dropout, 0.3)]
    return PipelineModule([*layers, LayerSpec(nn.Linear, 4, 4)], loss)


def marked(step: int, spoil: bool) -> list[Item]:
    return [Item(x, (y, spoil and i == 2)) for i, (x, y) in enumerate(items(step, (2, 2, 2, 2)))]


@pytest.mark.parametrize("how", ["nan", "inf", "gradient"])
@pytest.mark.parametrize(
    "layout", [Layout("1f1b", 1), Layout("split", 4), Layout("vee", 2, 2), Layout("1f1b", 4, data_parallel=2)], ids=str
)
def test_a_loss_or_gradient_that_is_not_finite_changes_nothing(how: str, layout: Layout) -> None:
    """Neither weights nor buffers, momentum, learning rate, steps or numbers drawn: the next step is clean."""

    def worker(spoil: bool) -> tuple[Any, ...]:
        engine = initialize(
            spoiled(how),
            config=layout.settings(gradient_clipping=1.0),
            optimizer=sgd,
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        )
        losses = []
        for step in range(3):
            if spoil and step != 1:
                with pytest.raises(NonFiniteLoss, match=r"nothing was updated\. .*Lower the learning rate"):
                    engine.train_batch(marked(step + 10, True))
                assert engine.steps == step
            losses.append(engine.train_batch(marked(step, False)).item())
        return losses, engine.full_state_dict(), engine.lr_scheduler.get_last_lr()

    clean, broken = run_local(worker, layout.ranks, False), run_local(worker, layout.ranks, True)
    for (losses, state, rate), (again, after, rate_after) in zip(clean, broken, strict=True):
        assert (again, rate_after) == (losses, rate)
        assert all(after[name].equal(tensor) for name, tensor in state.items())


def test_a_loss_that_is_not_finite_may_be_ignored() -> None:
    def worker() -> tuple[float, int]:
        engine = start(spoiled("nan"), nonfinite_loss="ignore")
        return engine.train_batch(marked(0, True)).item(), engine.steps

    for loss, steps in run_local(worker, 2):
        assert loss != loss
        assert steps == 1


# -- data ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [Layout("1f1b", 1), Layout("gpipe", 3), Layout("vee", 2, 2)], ids=str)
def test_an_iterator_that_ends_in_the_middle_of_a_step(layout: Layout) -> None:
    """The step is the mean over what there is; then there is none, again and again, until there is more."""
    stock = [item for step in range(3) for item in items(step)][:10]
    case = Case(model, lambda step, rank: stock[4 * step : 4 * step + 4], steps=3)

    def worker() -> tuple[list[float], Any]:
        engine = start(schedule=layout.schedule, stages_per_rank=layout.stages_per_rank)
        source = iter(stock)
        losses = [engine.train_batch(source).item() for _ in range(3)]
        state = engine.full_state_dict()
        for act in (engine.train_batch, engine.train_batch, engine.eval_batch, engine.forward):
            with pytest.raises(EndOfData, match="an iterator has no micro-batch left"):
                act(source)
        engine.train_batch(iter(stock))
        return losses, state

    found = run(case, layout)
    expected = plainly(case, layout, found.before)
    for losses, _ in run_local(worker, layout.ranks):
        assert losses == list(found.losses) == pytest.approx(expected.losses, rel=1e-12)


def uneven(counts: Sequence[int], **settings: Any) -> tuple[str, float]:
    """Each rank reads as many micro-batches as it is told; then all of them read four."""
    torch.set_default_dtype(torch.float64)
    engine = start(**settings)
    with pytest.raises(DataError) as caught:
        engine.train_batch(iter(items()[: counts[engine.mesh.rank]]))
    return str(caught.value), engine.train_batch(iter(items())).item()


@pytest.mark.parametrize(
    ("counts", "settings", "message"),
    [
        ((4, 4, 3), {}, "ranks read different numbers of micro-batches (rank 0: 4, rank 2: 3)"),
        ((2, 4, 4), {}, "iterators of one pipeline must yield the same items"),
        ((4, 4, 0), {}, "(rank 0: 4, rank 2: 0)"),
        ((4, 4, 2, 2), {"data_parallel": 2}, "(rank 0: 4, rank 1: 4, rank 2: 2, rank 3: 2)"),
        ((4, 4, 4, 1), {"data_parallel": 2}, "and those of data-parallel ranks equally many"),
    ],
)
def test_iterators_that_end_at_different_places(counts: Sequence[int], settings: Any, message: str) -> None:
    """Told on every rank before anything is sent; the next step is as if there had been none."""
    results = run_local(lambda: uneven(counts, **settings), len(counts))
    clean = run_local(lambda: start(**settings).train_batch(items()).item(), len(counts))
    assert all(message in told and loss == clean[0] for told, loss in results)


def test_iterators_that_end_at_different_places_between_processes() -> None:
    results = run_processes(uneven, 3, (4, 4, 2))
    assert {told for told, _ in results} == {results[0][0]}
    assert "(rank 0: 4, rank 2: 2)" in results[0][0]
    assert len({loss for _, loss in results}) == 1


def test_one_iterator_for_two_ranks() -> None:
    """Each would get what the other does not: inputs of one micro-batch with the targets of another."""
    shared = iter(items() * 4)

    def worker() -> float:
        engine = start()
        with pytest.raises(DataError, match="ranks 0 and 2 of one pipeline read the same iterator"):
            engine.train_batch(shared)
        return engine.train_batch(items()).item()

    assert len(set(run_local(worker, 3))) == 1


BAD_DATA: dict[str, tuple[Callable[[], Any], str]] = {
    "a list that is too long": (lambda: items() * 2, "got a list of 8 items for a step of 4 micro-batches"),
    "a tensor": (lambda: torch.zeros(4), "takes an iterator of (inputs, targets), got a Tensor"),
    "nothing": (lambda: None, "takes an iterator of (inputs, targets), got a NoneType"),
    "what starts again": (lambda: Again(), "make one once with iter(...) and pass the same one to every step"),
    "inputs without targets": (
        lambda: [x for x, _ in items()],
        "an item is a pair (inputs, targets), targets may be None",
    ),
    "three in an item": (lambda: [(x, y, 1) for x, y in items()], "got a tuple of 3"),
    "what raises": (lambda: (1 / 0 for _ in range(4)), "ZeroDivisionError: division by zero"),
}


class Again:
    def __iter__(self) -> Iterator[Item]:
        return iter(items())


@pytest.mark.parametrize("name", BAD_DATA)
def test_data_of_the_wrong_form(name: str) -> None:
    """On one rank alone: it raises its own error, the others tell whose it is."""
    make, message = BAD_DATA[name]

    def worker() -> tuple[str, float]:
        engine = start()
        bad = make() if engine.mesh.rank == 0 else iter(items())
        with pytest.raises((DataError, ZeroDivisionError)) as caught:
            engine.train_batch(bad)
        return str(caught.value), engine.train_batch(items()).item()

    results = run_local(worker, 3)
    told = [text for text, _ in results]
    assert message.partition(": ")[2] in told[0]
    assert message in told[1] == told[2]
    assert told[1].startswith("rank 0 could not read its micro-batches: ")
    assert len({loss for _, loss in results}) == 1


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (lambda t: 0.0, "none below 0 and not all 0"),
        (lambda t: -1.0 if len(t) == 1 else 1.0, "are [1.0, 1.0, 1.0, -1.0]; loss_weight must give finite numbers"),
        (lambda t: float("nan"), "are [nan, nan, nan, nan]"),
        (lambda t: "heavy", "ValueError: could not convert string to float: 'heavy'"),
    ],
)
def test_weights_that_are_none(weight: Any, message: str) -> None:
    told = refusals(3, lambda: start(model(loss_weight=weight)).train_batch(items()), (DataError, ValueError))
    assert all(message in text for text in told[:2])
    assert message.partition("ValueError: ")[2] in told[2]


def test_outputs_are_told_without_weights_or_targets() -> None:
    """A weight of targets that are not there is asked for by nobody."""

    def worker() -> Any:
        engine = start(model(loss_weight=lambda targets: targets.sum() / 0))
        return engine.forward([(x, None) for x, _ in items()])

    assert [len(y) for y in run_local(worker, 3)[2]] == [2, 2, 2, 1]


# -- ranks that differ ---------------------------------------------------------------------------------------

DIFFERENCES: dict[str, str] = {
    "schedule": "setting schedule: '1f1b' on rank 0, 'gpipe' on rank 1",
    "micro_batches": "setting micro_batches: 4 on rank 0, 8 on rank 1",
    "data_parallel": "setting data_parallel: 1 on rank 0, 2 on rank 1",
    "partition": "setting partition: 'uniform' on rank 0, [2] on rank 1",
    "seed": "setting seed: 0 on rank 0, 5 on rank 1",
    "threads": "setting threads: 1 on rank 0, 2 on rank 1",
    "timeout": "setting timeout: 300.0 on rank 0, 200.0 on rank 1",
    "layers": "layer 4: none on rank 0, Linear(4, 4) on rank 1",
    "arguments": "layer 0: Linear(4, 4) on rank 0, Linear(4, 4, bias=False) on rank 1",
    "loss": "loss: mse_loss on rank 0, l1_loss on rank 1",
    "default dtype": "default dtype: torch.float64 on rank 0, torch.float32 on rank 1",
}
CHANGES: dict[str, Any] = {"schedule": "gpipe", "micro_batches": 8, "data_parallel": 2, "partition": [2], "seed": 5}
CHANGES |= {"threads": 2, "timeout": 200.0}


def differ(what: str, rank: int) -> str:
    """Rank 1 has something else than the others; what this rank is told."""
    settings = {what: CHANGES[what]} if rank == 1 and what in CHANGES else {}
    module = model(5 if rank == 1 and what == "layers" else 4)
    if rank == 1 and what == "arguments":
        first = LayerSpec(nn.Linear, 4, 4, bias=False)
        module = PipelineModule([first, *module.entries[1:]], functional.mse_loss)
    if rank == 1 and what == "loss":
        module = model(loss_fn=functional.l1_loss)
    with pytest.raises(PlanMismatch) as caught:
        start(module, **settings)
    return str(caught.value)


def differ_as_process(what: str) -> str:
    rank = int(os.environ["RANK"])
    torch.set_default_dtype(torch.float32 if what == "default dtype" and rank == 1 else torch.float64)
    return differ(what, rank)


def test_ranks_with_other_settings_or_code() -> None:
    """Told on every rank, by name, before anything is built; nobody waits for anybody."""
    for what, message in DIFFERENCES.items():
        ranks = 4 if what == "data_parallel" else 2
        endings = try_processes(differ_as_process, ranks, what, timeout=60.0)
        for ending in endings:
            assert ending.exit_code == 0, ending.error
            assert message in ending.result, f"{what}: {ending.result}"
            assert ending.result.endswith("start every rank with the same code and settings")


def test_ready_modules_with_other_values() -> None:
    made = iter([nn.Linear(4, 4), nn.Linear(4, 4)])

    def worker() -> str:
        linear = next(made)
        with pytest.raises(ModelError) as caught:
            start(PipelineModule([nn.Tanh(), linear], functional.mse_loss))
        return str(caught.value)

    for told in run_local(worker, 2):
        assert "layer 1 (Linear) starts with other values on rank" in told
        assert "seed the generator before building it, or use a LayerSpec, which needs no seed" in told


def refused_on_one_rank(what: str) -> None:
    """Rank 1 has settings that are wrong by themselves; nobody catches anything."""
    start(**({"schedule": "1f2b"} if int(os.environ["RANK"]) == 1 else {}), **({"timeout": 200.0} if what else {}))


def test_a_setting_that_is_wrong_on_one_rank_ends_all() -> None:
    endings = try_processes(refused_on_one_rank, 3, "", timeout=60.0)
    assert [ending.exit_code for ending in endings] == [1, 1, 1]
    assert all("1f2b" in (ending.error or "") for ending in endings)


def typo_on_all_ranks() -> None:
    start(schedule="1f2b")


def test_wrong_settings_end_all_processes_at_once() -> None:
    started = time.monotonic()
    endings = try_processes(typo_on_all_ranks, 3, timeout=60.0)
    assert time.monotonic() - started < 30.0
    for ending in endings:
        assert ending.exit_code == 1
        assert "UnknownSchedule: there is no schedule '1f2b'; did you mean '1f1b'?" in (ending.error or "")


def wrong_world() -> None:
    start(data_parallel=2)


def test_a_wrong_number_of_processes_ends_all_at_once() -> None:
    for ending in try_processes(wrong_world, 3, timeout=60.0):
        assert ending.exit_code == 1
        assert "3 ranks cannot form 2 pipelines of equal length: set data_parallel to 1 or 3" in (ending.error or "")


CALLS = ("train_batch", "eval_batch", "forward")


def call_differently(first: str, second: str) -> tuple[str, float]:
    torch.set_default_dtype(torch.float64)
    engine = start()
    with pytest.raises(DataError) as caught:
        getattr(engine, second if engine.mesh.rank == 1 else first)(items())
    return str(caught.value), engine.train_batch(items()).item()


@pytest.mark.parametrize("run_workers", [run_local, run_processes], ids=["threads", "processes"])
@pytest.mark.parametrize(("first", "second"), [CALLS[:2], CALLS[1:], ("forward", "train_batch")])
def test_ranks_that_call_different_methods(run_workers: Any, first: str, second: str) -> None:
    """As when only one rank evaluates: told on every rank, and the next step is clean."""
    results = run_workers(call_differently, 3, first, second)
    for told, loss in results:
        assert f"rank 0 calls {first}; rank 1 calls {second}; rank 2 calls {first}" in told
        assert loss == results[0][1]

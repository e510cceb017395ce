"""ZeRO 1 to 3 around every stage: training equals plain PyTorch, in parts that are the size they should be."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from partition import LayerCost, Profile
from pipeline import LayerSpec, PipelineModule, TiedLayerSpec, initialize, run_local
from pipeline.batch import Item
from pipeline.errors import ConfigError, StepFailed
from pipeline.memory import MemoryReport
from tests.pipeline.layouts import Layout
from tests.pipeline.models import Recipe, adamw, restless
from tests.pipeline.reference import Case, agree, check, plainly
from tests.pipeline.running import everywhere, run, same_bits, train_here, transformer_case

SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2), ("zb-h1", 1), ("zb-v", 2))
MESHES = ((2, 1), (2, 2), (3, 2))  # copies of the pipeline, ranks of each
HOW: dict[str, dict[str, Any]] = {
    "1": {"zero": 1},
    "2": {"zero": 2},
    "2, once a step": {"zero": 2, "zero_reduce_every": "step"},
    "3": {"zero": 3},
    "3, one layer at a time": {"zero": 3, "zero_whole_layers": 1},
    "3, stages whole": {"zero": 3, "zero_whole_layers": 100, "zero_reduce_every": "step"},
}
RECIPES = {
    "plain": Recipe(tied=False, dtype=torch.float64),
    "tied": Recipe(dtype=torch.float64),
    "frozen": Recipe(tied=False, dtype=torch.float64, frozen=(0, 3, 4)),
}


def layout(schedule: str, stages: int, mesh: tuple[int, int], **others: Any) -> Layout:
    return Layout(schedule, mesh[0] * mesh[1], stages, 4, data_parallel=mesh[0], **others)


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(("schedule", "stages"), SCHEDULES)
def test_training_equals_plain_pytorch(schedule: str, stages: int, mesh: tuple[int, int], how: dict[str, Any]) -> None:
    recipe = list(RECIPES.values())[(len(how) + mesh[0] + mesh[1] + stages) % 3]
    case = transformer_case(recipe, 4, optimizer=adamw)
    where = layout(schedule, stages, mesh)
    found = run(case, where, gradient_clipping=0.5, **how)
    agree(found, plainly(case, where, found.before, clip=0.5), str(where), 1e-11)


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_every_kind_of_parameter(recipe: Recipe, how: dict[str, Any]) -> None:
    where = layout("zb-h1", 1, (2, 2), recompute="every:2")
    case = transformer_case(recipe, 4, optimizer=adamw)
    found = run(case, where, **how)
    agree(found, plainly(case, where, found.before), str(where), 1e-11)
    assert found.norms == run(case, where, zero=0).norms or how["zero"]  # to the last bit only between equals


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_the_pipeline_does_not_change_the_bits(how: dict[str, Any]) -> None:
    case = transformer_case(Recipe(), 4, optimizer=restless)
    found = [run(case, layout(s, v, (2, p)), **how) for s, v, p in (("gpipe", 1, 1), ("1f1b", 1, 2), ("zb-h1", 1, 3))]
    assert all(same_bits(other, found[0]) for other in found[1:])


@pytest.mark.parametrize("how", [HOW["1"], HOW["2"], HOW["3, one layer at a time"]], ids=str)
@pytest.mark.parametrize(
    ("schedule", "options"),
    [("dualpipe", ()), ("dualpipe", (("overlapped", True),)), ("dualpipe-v", (("overlapped", True),)), ("chimera", ())],
    ids=str,
)
def test_two_copies_of_the_weights_and_two_passes_in_one(
    schedule: str, options: tuple[tuple[str, Any], ...], how: dict[str, Any]
) -> None:
    where = layout(schedule, 2, (2, 2), options=options)
    case = transformer_case(RECIPES["tied"], 4, optimizer=adamw)
    found = run(case, where, **how)
    agree(found, plainly(case, where, found.before), str(where), 1e-11)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_processes(zero: int) -> None:
    where = layout("interleaved-1f1b", 2, (2, 2))
    case = transformer_case(RECIPES["tied"], 4, optimizer=adamw)
    results = everywhere(train_here, 4, case, where, processes=True, zero=zero)
    assert all(agrees for _, agrees in results)
    found = results[0][0]
    agree(found, plainly(case, where, found.before), str(where), 1e-11)


def exchanged(zero: int) -> tuple[list[str], list[str], bool]:
    """What the predicted and the measured timeline of a step have beside passes, and whether it lies where it must."""
    cost = LayerCost(
        name="l", type="L", forward=1e-3, input_grad=1e-3, weight_grad=1e-3, parameters=20, parameter_bytes=80
    )
    module = PipelineModule([LayerSpec(nn.Linear, 4, 4) for _ in range(4)], functional.mse_loss)
    config = {"data_parallel": 2, "zero": zero, "micro_batches": 2, "zero_reduce_every": "step"}
    engine = initialize(module, config=config, optimizer=torch.optim.SGD, profile=Profile(layers=(cost,) * 4))
    for _ in range(2):
        engine.train_batch(iter([Item(torch.ones(1, 4), torch.zeros(1, 4))] * 2))
    predicted, measured = engine.predicted_timeline(), engine.timeline()
    starts, ends = ([float(row.min()) for row in measured.start], [float(row.max()) for row in measured.end])
    placed = all(
        0 < span.start < span.end and (span.start >= ends[span.rank]) == span.action.startswith("REDUCE")
        if span.action.startswith("REDUCE")
        else span.start <= starts[span.rank]
        for span in measured.other
    )
    return sorted(s.action for s in predicted.other), sorted(s.action for s in measured.other), placed


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_both_timelines_show_what_replicas_exchange(zero: int) -> None:
    reductions = ["REDUCE_GRAD 0", "REDUCE_GRAD 1"]
    expected = reductions if zero == 0 else [*reductions, "UNSHARD 0", "UNSHARD 1"]
    for predicted, measured, placed in run_local(exchanged, 4, zero):
        assert predicted == measured == expected
        assert placed


# -- stages of all sorts -------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Parameters of sizes that no number of ranks divides, one of them empty, one of no dimension."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width)
        self.scale = nn.Parameter(torch.ones(()))
        self.nothing = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.weight).tanh() * self.scale + self.nothing.sum()


def odd() -> PipelineModule:
    return PipelineModule(
        [
            TiedLayerSpec("table", nn.Embedding, 7, 5),
            LayerSpec(nn.Tanh),
            LayerSpec(Odd, 5),
            torch.tanh,
            LayerSpec(nn.Linear, 5, 5),
            TiedLayerSpec("table", nn.Embedding, 7, 5, forward=_read_out),
        ],
        _loss,
    )


def _read_out(table: nn.Embedding, x: Tensor) -> Tensor:
    return x @ table.weight.t()


def _loss(output: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def _words(step: int, data_rank: int) -> list[Item]:
    generator = torch.Generator().manual_seed(10 * step + data_rank)
    tokens = [torch.randint(0, 7, (n, 3), generator=generator) for n in (2, 1, 2, 3)]
    return [Item(x, (x + 1) % 7) for x in tokens]


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("cuts", [(0, 2, 4, 6), (0, 0, 1, 6), (0, 1, 2, 6), (0, 3, 4, 6)], ids=str)
def test_stages_with_nothing_to_train_or_nothing_at_all(cuts: tuple[int, ...], zero: int) -> None:
    for schedule in ("1f1b", "zb-h1"):
        check(Case(odd, _words, optimizer=adamw), layout(schedule, 1, (3, 3), partition=cuts), zero=zero)


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_groups_with_settings_of_their_own_across_the_border_of_parts(zero: int) -> None:
    def groups(name: str, shape: torch.Size) -> dict[str, Any]:
        return {"lr": 0.03, "weight_decay": 0.0} if len(shape) < 2 else {"lr": 0.01, "weight_decay": 0.1}

    case = transformer_case(RECIPES["plain"], 4, optimizer=adamw)
    unsharded, sharded = (run(case, layout("1f1b", 1, (3, 2)), zero=z, param_groups=groups) for z in (0, zero))
    agree(sharded, unsharded, f"zero {zero}", 1e-11)


# -- what is held --------------------------------------------------------------------------------------------


def _held(zero: int) -> MemoryReport:
    module = PipelineModule([LayerSpec(nn.Linear, 64, 64, bias=False) for _ in range(4)], functional.mse_loss)
    config = {"zero": zero, "data_parallel": 2, "micro_batches": 2, "partition": "uniform", "device": "cpu"}
    layer = LayerCost(
        name="", type="Linear", forward=1, input_grad=1, weight_grad=1, parameters=64 * 64, parameter_bytes=4 * 64 * 64
    )
    engine = initialize(module, config=config, optimizer=torch.optim.Adam, profile=Profile(layers=(layer,) * 4))
    for _ in range(2):
        engine.train_batch([(torch.ones(1, 64), torch.zeros(1, 64))] * 2)
    return engine.memory_report()


@pytest.mark.parametrize(
    ("zero", "parameters", "gradients", "optimizer"),
    [(0, 1.0, 1.0, 1.0), (1, 1.0, 1.0, 0.5), (2, 1.0, 0.5, 0.5), (3, 0.5, 0.5, 0.5)],
)
def test_each_rank_holds_its_part(zero: int, parameters: float, gradients: float, optimizer: float) -> None:
    whole = 4 * 2 * 64 * 64  # bytes of the two layers of a stage
    steps = 4 * 2  # a number beside the moments of each layer
    for report in run_local(_held, 4, zero):
        assert report.measured == ((parameters * whole, gradients * whole, 2 * optimizer * whole + steps, 0.0),) * 2
        assert report.predicted is not None
        for rank in report.predicted:
            assert rank[:4] == (parameters * whole, gradients * whole, 2 * optimizer * whole, 0.0)
        assert str(report).count("*") == 2


# -- steps that fail -----------------------------------------------------------------------------------------


class Explosive(nn.Linear):
    """Raises in its forward, or in its backward, when it is told to by a number in its input."""

    def forward(self, x: Tensor) -> Tensor:
        if bool((x == 123).any()):
            raise RuntimeError("forward went wrong")
        y = super().forward(x)
        if y.requires_grad and bool((x == 321).any()):
            y.register_hook(_raise)
        return y


def _raise(gradient: Tensor) -> Tensor:
    raise RuntimeError("backward went wrong")


def _fail_and_go_on(zero: int, number: float, schedule: str, stages: int) -> list[float]:
    module = PipelineModule([LayerSpec(Explosive, 4, 4) for _ in range(8)], functional.mse_loss)
    engine = initialize(
        module,
        config={
            "schedule": schedule, "stages_per_rank": stages, "zero": zero, "data_parallel": 2, "micro_batches": 4,
            "partition": "uniform", "device": "cpu", "zero_whole_layers": 1,
        },
        optimizer=partial(torch.optim.SGD, lr=0.1),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(engine.mesh.data_rank)
    items = [(torch.randn(2, 4, generator=generator), torch.zeros(2, 4)) for _ in range(4)]
    losses = [engine.train_batch(iter(items)).item()]
    broken = list(items)
    if engine.mesh.data_rank == 1:  # on one of the two pipelines only
        broken[2] = (torch.full((2, 4), number), items[2][1])
    if number:
        with pytest.raises(StepFailed, match="went wrong"):
            engine.train_batch(iter(broken))
    losses += [engine.train_batch(iter(items)).item() for _ in range(2)]
    return [*losses, engine.eval_batch(iter(items)).item()]


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 1), ("zb-h1", 1), ("interleaved-1f1b", 2)])
def test_a_step_that_fails_on_one_rank_leaves_nothing_behind(schedule: str, stages: int, zero: int) -> None:
    untouched = run_local(_fail_and_go_on, 4, zero, 0.0, schedule, stages)
    for number in (123.0, 321.0):
        assert run_local(_fail_and_go_on, 4, zero, number, schedule, stages) == untouched


# -- checkpoints ---------------------------------------------------------------------------------------------


def _train(case: Case, where: Layout, path: str, first: int, last: int, **others: Any) -> dict[str, Tensor]:
    """Go on from the latest checkpoint, if there is one, and leave another."""
    engine = initialize(case.model(), config=where.settings(**others), optimizer=case.optimizer)
    if first:
        engine.load_checkpoint(path)
    for step in range(first, last):
        engine.train_batch(case.items(step, engine.mesh.data_rank))
    engine.save_checkpoint(path)
    return engine.full_state_dict()


@pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])
@pytest.mark.parametrize(("before", "after"), [(3, 1), (0, 2), (2, 3), (1, 0)])
def test_a_checkpoint_is_gone_on_from_in_other_parts(tmp_path: Any, before: int, after: int, processes: bool) -> None:
    case = transformer_case(RECIPES["tied"], 4, optimizer=adamw)
    at_once, other = layout("1f1b", 1, (2, 2)), layout("gpipe", 1, (2, 1))
    if processes:
        case, other = case, layout("zb-h1", 1, (2, 2))
    (expected, *_) = everywhere(_train, 4, case, at_once, str(tmp_path / "whole"), 0, 4, zero=before)
    everywhere(_train, 4, case, at_once, str(tmp_path / "half"), 0, 2, zero=before, processes=processes)
    (found, *_) = everywhere(
        _train, other.ranks, case, other, str(tmp_path / "half"), 2, 4, zero=after, processes=processes
    )
    apart = max(float((found[name] - tensor).abs().max()) for name, tensor in expected.items())
    assert apart <= 1e-12


# -- what the user sees of parameters ------------------------------------------------------------------------


def _look() -> tuple[bool, bool, bool]:
    module = PipelineModule([LayerSpec(nn.Linear, 3, 3), LayerSpec(nn.Linear, 3, 3)], functional.mse_loss)
    config = {"zero": 3, "data_parallel": 2, "micro_batches": 1, "partition": "uniform", "device": "cpu"}
    engine = initialize(module, config=config, optimizer=torch.optim.Adam)
    ((layer),) = engine._planned().built.layers.values()
    weight = layer.module.weight
    before = bool(weight.isnan().all())
    engine.train_batch([(torch.ones(1, 3), torch.zeros(1, 3))])
    with engine._planned().whole():
        whole = bool(weight.isfinite().all())
    return before, whole, bool(weight.isnan().all()) and "nan" in repr(weight)


def test_parameters_that_are_not_there_are_no_numbers() -> None:
    assert run_local(_look, 4) == [(True, True, True)] * 4


# -- whole parameters ----------------------------------------------------------------------------------------


def _adafactor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=0.01, eps=(1e-4, 1e-3))


@pytest.mark.parametrize("how", [HOW["1"], HOW["2"], HOW["3"], {"zero": 0}], ids=str)
def test_an_optimizer_that_works_on_matrices_gets_whole_ones(how: dict[str, Any]) -> None:
    where = layout("1f1b", 1, (3, 2))
    case = transformer_case(RECIPES["tied"], 4, optimizer=_adafactor)
    found = run(case, where, optimizer_view="parameters", **how)
    agree(found, plainly(case, where, found.before), str(where), 1e-9)


def test_what_is_kept_of_matrices_is_gone_on_from(tmp_path: Any) -> None:
    case = transformer_case(RECIPES["tied"], 4, optimizer=_adafactor)
    first, then = layout("1f1b", 1, (2, 2)), layout("gpipe", 1, (2, 1))
    settings = {"zero": 2, "optimizer_view": "parameters"}
    (expected, *_) = everywhere(_train, 4, case, first, str(tmp_path / "whole"), 0, 4, **settings)
    everywhere(_train, 4, case, first, str(tmp_path / "half"), 0, 2, **settings)
    (found, *_) = everywhere(_train, 2, case, then, str(tmp_path / "half"), 2, 4, **{**settings, "zero": 0})
    assert max(float((found[name] - tensor).abs().max()) for name, tensor in expected.items()) <= 1e-12


def _with(optimizer: Any) -> None:
    module = PipelineModule([LayerSpec(nn.Linear, 3, 3, bias=False)], functional.mse_loss)
    initialize(module, config={"partition": "uniform", "device": "cpu"}, optimizer=optimizer)


@pytest.mark.parametrize("optimizer", [torch.optim.Adafactor, partial(torch.optim.Muon, lr=0.1), _adafactor])
def test_an_optimizer_that_works_on_matrices_is_refused_vectors(optimizer: Any) -> None:
    with pytest.raises(ConfigError, match=r'works on whole matrices.*set optimizer_view = "parameters"'):
        _with(optimizer)


def test_an_optimizer_that_runs_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="LBFGS runs the model itself"):
        _with(torch.optim.LBFGS)

"""Layouts that change while training runs: the same bits as if they had not, from any layout to any other."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline import LayerSpec, PipelineModule, initialize
from pipeline.batch import Item
from pipeline.migrate import Moved
from tests.pipeline.models import Recipe, adamw, micro_batches, restless, transformer
from tests.pipeline.reference import Case, Outcome
from tests.pipeline.running import copies_agree, everywhere, same_bits

BATCH = 4  # micro-batches of a step, over all pipelines


@dataclass(frozen=True)
class Place:
    """A layout on a fixed number of ranks, as settings."""

    schedule: str = "1f1b"
    stages_per_rank: int = 1
    data_parallel: int = 1
    zero: int = 0
    partition: str | tuple[int, ...] = "uniform"
    recompute: str = "none"

    def settings(self) -> dict[str, Any]:
        return {**vars(self), "micro_batches": BATCH // self.data_parallel}


def items(step: int, data_rank: int, data: int) -> list[Item]:
    each = BATCH // data
    return micro_batches(BATCH, step)[data_rank * each : (data_rank + 1) * each]


def journey(case: Case, places: list[Place], steps: int, others: Mapping[str, Any]) -> tuple[Outcome, list[Moved]]:
    """Train on the calling rank, some steps in each of these layouts."""
    settings = {**places[0].settings(), "device": "cpu", "timeout": 30.0, **others}
    engine = initialize(case.model(), config=settings, optimizer=case.optimizer)
    before, losses, norms, moved = engine.full_state_dict(), [], [], []
    for number, place in enumerate(places):
        if number:
            now, then = place.settings(), places[number - 1].settings()
            moved.append(engine.relayout(**{name: v for name, v in now.items() if v != then[name]}))
        for _ in range(steps):
            mesh = engine.mesh
            losses.append(engine.train_batch(items(engine.steps, mesh.data_rank, mesh.data)).item())
            norms.append(engine.stats.gradient_norm if engine.stats else 0.0)
    after = engine.full_state_dict()
    assert copies_agree(engine, after)
    return Outcome(before, tuple(losses), tuple(norms), (), after), moved


def travel(case: Case, ranks: int, places: list[Place], steps: int = 2, **others: Any) -> tuple[Outcome, list[Moved]]:
    processes = others.pop("processes", False)
    found = everywhere(journey, ranks, case, places, steps, others, processes=processes)
    assert all(outcome.losses == found[0][0].losses for outcome, _ in found)
    outcome, moved = found[0]
    return outcome, moved


def close(found: Outcome, expected: Outcome, tolerance: float = 1e-11) -> bool:
    pairs = [(found.after[name], tensor) for name, tensor in expected.after.items()]
    losses = zip(found.losses, expected.losses, strict=True)
    return all(abs(a - b) <= tolerance * abs(b) for a, b in losses) and all(
        float((a - b).abs().max()) <= tolerance * max(1.0, float(b.abs().max())) for a, b in pairs
    )


def case_of(recipe: Recipe, optimizer: Any = restless) -> Case:
    return Case(partial(transformer, recipe), partial(micro_batches, BATCH), 2, optimizer)


def test_layers_that_change_places_take_everything_with_them() -> None:
    case = case_of(Recipe())
    there = [Place(partition=(0, 4, 12)), Place(partition=(0, 8, 12)), Place(partition=(0, 6, 12))]
    found, moved = travel(case, 2, there)
    stayed, _ = travel(case, 2, [there[0]] * 3)
    assert same_bits(found, stayed)
    assert [m.layers for m in moved] == [(4, 5, 6, 7), (6, 7)]


def test_layers_that_are_whole_only_while_they_are_used() -> None:
    case = case_of(Recipe(dtype=torch.float64), adamw)
    cuts = ((0, 6, 12), (0, 4, 12), (0, 8, 12))
    places = [Place(name, 1, 2, 3, cut) for name, cut in zip(("1f1b", "1f1b", "zb-h1"), cuts, strict=True)]
    found, moved = travel(case, 4, places)
    assert same_bits(found, travel(case, 4, places[:1] * 3)[0])
    assert [m.layers for m in moved] == [(4, 5), (4, 5, 6, 7)]


def test_nothing_moves_where_nothing_has_to() -> None:
    places = [Place(), Place(schedule="zb-h1"), Place(schedule="gpipe", recompute="every")]
    found, moved = travel(case_of(Recipe()), 2, places)
    assert [m.bytes for m in moved] == [0, 0]
    assert same_bits(found, travel(case_of(Recipe()), 2, [Place()] * 3)[0])


@pytest.mark.parametrize("recipe", [Recipe(), Recipe(tied=False), Recipe(tied=False, frozen=(0, 3, 4))], ids=str)
def test_from_shape_to_shape(recipe: Recipe) -> None:
    case = case_of(recipe)
    places = [Place(), Place("interleaved-1f1b", 2), Place("zb-v", 2), Place("zb-h1"), Place("interleaved-1f1b", 3)]
    found, _ = travel(case, 3, places, steps=1)
    assert same_bits(found, travel(case, 3, [Place()] * 5, steps=1)[0])


def _anywhere(seed: int) -> tuple[int, list[Place]]:
    """A number of ranks, and three layouts on it, drawn by a seed."""
    draw = random.Random(seed)
    ranks = draw.choice((1, 2, 3, 4))
    places = []
    for _ in range(3):
        data = draw.choice((1, 2)) if ranks % 2 == 0 else 1
        stages = draw.choice((1, 2, 3))
        name = draw.choice(("1f1b", "gpipe", "zb-h1")) if stages == 1 else "interleaved-1f1b"
        zero = draw.choice((0, 1, 2, 3))
        places.append(Place(name, stages, data, zero, recompute=draw.choice(("none", "every:2"))))
    return ranks, places


@pytest.mark.parametrize("seed", range(12))
def test_from_any_layout_to_any_other(seed: int) -> None:
    ranks, places = _anywhere(seed)
    recipe = Recipe(tied=seed % 2 == 0, dtype=torch.float64, frozen=() if seed % 3 else (0, 3, 4) * (seed % 2))
    case = case_of(recipe, adamw)
    found, _ = travel(case, ranks, places)
    assert close(found, travel(case, 1, [Place()] * 3)[0])
    if len({(place.data_parallel, place.zero if place.data_parallel > 1 else 0) for place in places}) == 1:
        assert same_bits(found, travel(case, ranks, places[:1] * 3)[0])


def test_ranks_that_are_processes() -> None:
    ranks, places = 4, [Place("interleaved-1f1b", 2, 2, 3), Place("1f1b", 1, 1, 0), Place("zb-h1", 1, 2, 1)]
    case = case_of(Recipe(dtype=torch.float64), adamw)
    found, _ = travel(case, ranks, places, processes=True)
    assert close(found, travel(case, 1, [Place()] * 3)[0])


class Counted(nn.Module):
    """A layer with all kinds of state: statistics, a buffer that grows, and a number that only it knows of."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.linear = nn.Linear(6, 6)
        self.calls = 0
        self.register_buffer("seen", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen = torch.cat([self.seen, x.detach().mean().reshape(1)])
        return self.linear(self.norm(x)).tanh() * (1 + 1e-3 * self.calls)

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


def _mean_square(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().mean()


def _rows(step: int, data_rank: int = 0) -> list[Item]:
    generator = torch.Generator().manual_seed(step)
    return [Item(torch.randn(5, 6, generator=generator), torch.randn(5, 6, generator=generator)) for _ in range(4)]


def _with_state(cuts: list[tuple[int, ...]], module: PipelineModule, optimizer: Any) -> list[Any]:
    engine = initialize(
        module,
        config={"partition": cuts[0], "micro_batches": 4, "device": "cpu"},
        optimizer=optimizer,
        lr_scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5),
    )
    losses = []
    for cut in cuts:
        engine.relayout(partition=cut)
        losses += [engine.train_batch(_rows(engine.steps)).item() for _ in range(2)]
    state = engine.full_state_dict()
    seen = {held.layer: layer.module.seen for held, layer in engine._planned().built.layers.items() if layer.module}
    calls = [len(seen[i]) for i in sorted(seen)]
    return [losses, {name: t.tolist() for name, t in state.items()}, calls, engine.lr_scheduler.get_last_lr()]


@pytest.mark.parametrize("ready", [False, True], ids=["specs", "ready-made"])
@pytest.mark.parametrize(
    "optimizer", [partial(torch.optim.Adagrad, lr=0.1), partial(torch.optim.SGD, lr=0.1, momentum=0.9)], ids=str
)
def test_buffers_and_what_else_a_layer_keeps(ready: bool, optimizer: Any) -> None:
    cuts = [(0, 3, 6), (0, 1, 6), (0, 5, 6), (0, 3, 6)]
    module = PipelineModule([Counted() if ready else LayerSpec(Counted) for _ in range(6)], _mean_square)
    moved = everywhere(_with_state, 2, cuts, module, optimizer)
    stayed = everywhere(_with_state, 2, cuts[:1] * 4, module, optimizer)
    assert moved == stayed
    assert moved[0][2] == [32, 32, 32]  # forwards of each layer of the first rank, one a micro-batch


def _freezing(cuts: tuple[int, ...]) -> list[float]:
    engine = initialize(
        PipelineModule([LayerSpec(nn.Linear, 6, 6) for _ in range(4)], _mean_square),
        config={"partition": (0, 2, 4), "micro_batches": 4, "device": "cpu"},
        optimizer=partial(torch.optim.AdamW, lr=0.05),
    )
    losses = [engine.train_batch(_rows(0)).item()]
    for held, layer in engine._planned().built.layers.items():
        if layer.module is not None and held.layer == 1:
            layer.module.requires_grad_(False)
    engine.relayout(partition=cuts)
    before = engine.full_state_dict()
    losses += [engine.train_batch(_rows(step)).item() for step in (1, 2)]
    after = engine.full_state_dict()
    changed = {name: not torch.equal(before[name], after[name]) for name in before}
    assert changed == {name: not name.startswith("layers.1.") for name in before}
    return losses


def test_parameters_frozen_before_a_move_stay_frozen_where_they_go() -> None:
    assert everywhere(_freezing, 2, (0, 1, 4)) == everywhere(_freezing, 2, (0, 2, 4))


def _precisions(changes: list[dict[str, Any]]) -> list[float]:
    case = case_of(Recipe(tied=False), adamw)
    engine = initialize(
        case.model(), config={"partition": "uniform", "micro_batches": 4, "device": "cpu"}, optimizer=adamw
    )
    losses = []
    for change in changes:
        engine.relayout(**change)
        losses += [engine.train_batch(case.items(engine.steps, 0)).item() for _ in range(2)]
    return losses


def test_types_change_and_weights_in_fp32_go_on() -> None:
    there = {"precision": {"*": "bf16", "*norm*": "fp32"}}
    back = {"precision": {"*": "fp32"}, "schedule": "zb-h1"}
    losses = everywhere(_precisions, 2, [there, back, there])[0]
    plain = everywhere(_precisions, 2, [{}, {}, {}])[0]
    assert losses != plain
    assert losses == pytest.approx(plain, rel=0.02)


def _refused(changes: dict[str, Any]) -> None:
    case = case_of(Recipe())
    engine = initialize(case.model(), config={"partition": "uniform", "device": "cpu"}, optimizer=adamw)
    engine.relayout(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 3}, "seed cannot change while training runs"),
        ({"partition": "profile"}, "there is no profile to cut by"),
        ({"schedule": "forward-only"}, "has no backward"),
        ({"stages_per_rank": 0}, "stages_per_rank = 0 is not possible"),
        ({"partiton": "uniform"}, "did you mean 'partition'"),
        ({"data_parallel": 3}, "cannot form 3 pipelines"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        everywhere(_refused, 2, changes)

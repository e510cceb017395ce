"""A run that stops at a checkpoint and goes on in another layout computes the same bits as one that never stopped."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pipeline.layouts import Layout
from tests.pipeline.models import MakeOptimizer, Recipe, adamw, sgd
from tests.pipeline.reference import Case, Outcome
from tests.pipeline.running import agreed, copies_agree, everywhere, same_bits, start, transformer_case

STEPS = 5

ADAMW, SGD = (Recipe(), adamw), (Recipe(norm="batch"), sgd)

MOVES = [
    (ADAMW, Layout("1f1b", 2), Layout("1f1b", 2)),
    (ADAMW, Layout("1f1b", 1), Layout("interleaved-1f1b", 2, 3)),
    (SGD, Layout("gpipe", 4), Layout("1f1b", 1)),
    (SGD, Layout("interleaved-1f1b", 2, 2, recompute="every"), Layout("1f1b", 3, partition=(0, 1, 11, 12))),
    (ADAMW, Layout("1f1b", 4, partition=(0, 0, 5, 12, 12)), Layout("gpipe", 2, 3, recompute=(1, 5))),
    (SGD, Layout("1f1b", 2, data_parallel=2), Layout("1f1b", 4, data_parallel=2)),
]

PLACES = {
    "processes to processes": (Layout("1f1b", 2), True, Layout("interleaved-1f1b", 4, 2), True),
    "processes to threads": (Layout("1f1b", 4, data_parallel=2), True, Layout("1f1b", 2, data_parallel=2), False),
    "threads to processes": (Layout("1f1b", 1), False, Layout("1f1b", 2, recompute="every"), True),
}


def go_on(case: Case, layout: Layout, folder: str, stop: int, others: dict[str, Any]) -> tuple[Outcome, bool]:
    """Train on the calling rank, from the latest checkpoint if there is one, to step ``stop``; write one there."""
    engine = start(case, layout, **others)
    if (Path(folder) / "latest").exists():
        engine.load_checkpoint(folder)
    engine.mesh.world.barrier()  # nobody writes while another rank has yet to look
    before = engine.full_state_dict()
    losses, norms = [], []
    for step in range(engine.steps, stop):
        losses.append(engine.train_batch(case.items(step, engine.mesh.data_rank)).item())
        norms.append(engine.stats.gradient_norm if engine.stats else 0.0)
    engine.save_checkpoint(folder)
    after = engine.full_state_dict()
    return Outcome(before, tuple(losses), tuple(norms), (), after), copies_agree(engine, after)


def train_to(case: Case, layout: Layout, folder: Path, stop: int, *, processes: bool = False, **others: Any) -> Outcome:
    results = everywhere(go_on, layout.ranks, case, layout, str(folder), stop, others, processes=processes)
    return agreed(results, layout)


def warm_up_and_decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=STEPS + 1, cycle_momentum=False)


def by_name(name: str, shape: torch.Size) -> dict[str, Any]:
    return {"weight_decay": 0.1 if len(shape) > 1 else 0.0}


EVERYTHING = {"gradient_clipping": 1.0, "lr_scheduler": warm_up_and_decay, "param_groups": by_name}


@cache
def in_one_go(recipe: Recipe, optimizer: MakeOptimizer, copies: int, folder: Path) -> Outcome:
    case = transformer_case(recipe, 4, optimizer=optimizer)
    return train_to(case, Layout("1f1b", copies, data_parallel=copies), folder, STEPS, **EVERYTHING)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The outcome of a run that never stops."""

    def outcome(recipe: Recipe, optimizer: MakeOptimizer, copies: int) -> Outcome:
        return in_one_go(recipe, optimizer, copies, tmp_path_factory.getbasetemp() / f"{recipe}{optimizer}{copies}")

    return outcome


@pytest.mark.parametrize(("kind", "first", "second"), MOVES, ids=[f"{first} to {second}" for _, first, second in MOVES])
def test_go_on_in_another_layout(
    kind: tuple[Recipe, MakeOptimizer], first: Layout, second: Layout, tmp_path: Path, whole: Any
) -> None:
    check(kind, [(first, False), (second, False)], tmp_path, whole)


@pytest.mark.parametrize("place", PLACES)
def test_go_on_elsewhere(place: str, tmp_path: Path, whole: Any) -> None:
    first, in_processes, second, then_in_processes = PLACES[place]
    check(ADAMW, [(first, in_processes), (second, then_in_processes)], tmp_path, whole)


def check(kind: tuple[Recipe, MakeOptimizer], moves: list[tuple[Layout, bool]], folder: Path, whole: Any) -> None:
    """Stop after 2 steps, go on for one elsewhere, and again where it began to the end."""
    recipe, optimizer = kind
    case = transformer_case(recipe, 4, optimizer=optimizer)
    there = zip((*moves, moves[0]), (2, 3, STEPS), strict=True)
    parts = [train_to(case, layout, folder, stop, processes=p, **EVERYTHING) for (layout, p), stop in there]
    together = Outcome(
        parts[0].before,
        sum((part.losses for part in parts), ()),
        sum((part.norms for part in parts), ()),
        (),
        parts[-1].after,
    )
    assert [len(part.losses) for part in parts] == [2, 1, STEPS - 3]
    assert same_bits(together, whole(recipe, optimizer, moves[0][0].data_parallel))
    assert (folder / "latest").read_text().strip() == f"step-{STEPS:08d}"

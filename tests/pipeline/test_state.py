"""The whole state of a model by name: taken from one layout, given to another, refused where it does not fit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pipeline import run_local
from pipeline.errors import StateError
from tests.pipeline.layouts import Layout
from tests.pipeline.models import Recipe
from tests.pipeline.reference import train
from tests.pipeline.running import run, start, transformer_case

CASE = transformer_case(Recipe(tied=True), 4)


@pytest.mark.parametrize(
    "layout",
    [Layout(ranks=2), Layout("interleaved-1f1b", 3, 2), Layout("chimera", 2, 2), Layout(ranks=4, data_parallel=2)],
)
def test_the_state_of_one_layout_is_loaded_by_another(layout: Layout) -> None:
    trained = run(CASE, Layout()).after

    def worker() -> dict[str, Tensor]:
        engine = start(CASE, layout)
        engine.load_full_state_dict(trained)
        return engine.full_state_dict()

    held = run_local(worker, layout.ranks)[0]
    assert held.keys() == trained.keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in trained.items())


def _without_one(state: dict[str, Tensor], rank: int) -> None:
    if rank == 1:
        del state["layers.8.qkv.weight"]


def _one_too_many(state: dict[str, Tensor], rank: int) -> None:
    if rank == 1:
        state["layers.99.weight"] = torch.zeros(1)


def _of_another_shape(state: dict[str, Tensor], rank: int) -> None:
    state["layers.8.qkv.weight"] = torch.zeros(3, 3)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (_without_one, "there is no 'layers.8.qkv.weight' in what is to be loaded; it has 42 names"),
        (_one_too_many, "the model has no 'layers.99.weight', which is to be loaded; names too many: 1"),
        (_of_another_shape, "layers.8.qkv.weight has shape (3, 3), the model needs (24, 8)"),
    ],
)
def test_a_state_that_does_not_fit_one_rank_is_refused_on_all(
    spoil: Callable[[dict[str, Tensor], int], None], text: str
) -> None:
    trained = run(CASE, Layout()).after

    def worker() -> tuple[str, bool]:
        engine = start(CASE, Layout(ranks=2))
        train(engine, CASE)
        before = engine.mesh.world.broadcast_object(engine.full_state_dict(), 0)
        state = dict(trained)
        spoil(state, engine.mesh.rank)
        with pytest.raises(StateError) as caught:
            engine.load_full_state_dict(state)
        after = engine.mesh.world.broadcast_object(engine.full_state_dict(), 0)
        return str(caught.value), all(torch.equal(before[name], after[name]) for name in before)

    assert run_local(worker, 2) == [(text, True)] * 2

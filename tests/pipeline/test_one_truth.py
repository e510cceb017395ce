"""One truth: what a rank computes, what the recorder stamps and what the schedule says are the same, in every step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from schedules import Action, Kind, build
from tests.pipeline.layouts import Layout, layouts, training_schedules
from tests.pipeline.models import Recipe
from tests.pipeline.orders import declare
from tests.pipeline.reference import Case
from tests.pipeline.running import everywhere, start, transformer_case
from tests.pipeline.witness import Account, Call, Witness

SHAPES = ((1, 2, 3), (2, 1, 1), (2, 3, 4), (3, 1, 5), (4, 1, 3), (4, 3, 8))
THREADS = [shape for ranks, v, count in SHAPES for shape in layouts((ranks,), (v,), (count,))]


def watch(case: Case, chosen: list[Layout]) -> list[tuple[Layout, str, tuple[Any, ...], Account]]:
    """The accounts of the calling rank: two whole steps, one with a micro-batch less, one evaluation."""
    accounts = []
    for layout in chosen:
        engine = start(case, layout)
        engine.full_state_dict()
        witness = Witness(engine)
        items = case.items(0, engine.mesh.data_rank)[: layout.micro_batches]
        for name, run, given in (
            ("step", engine.train_batch, items),
            ("step", engine.train_batch, items),
            ("short step", engine.train_batch, items[:-1] or items),
            ("evaluation", engine.eval_batch, items),
        ):
            run(given)
            row = engine.schedule.rows[engine.mesh.pipe_rank]
            accounts.append((layout, name, row, witness.account()))
    return accounts


def check(results: list[list[tuple[Layout, str, tuple[Any, ...], Account]]]) -> None:
    for rank in results:
        for layout, name, row, account in rank:
            assert not account.objections(), f"{layout}, {name}"
            if name == "step":
                assert account.entries == row, f"{layout}, {name}"


@pytest.mark.parametrize("layout", THREADS, ids=str)
def test_every_schedule_on_threads(layout: Layout) -> None:
    check(everywhere(watch, layout.ranks, transformer_case(Recipe(), layout.micro_batches), [layout]))


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_schedule_on_processes(ranks: int) -> None:
    chosen = [next(layouts((ranks,), (2, 1), (4,), [name])) for name in training_schedules()]
    check(everywhere(watch, ranks, transformer_case(Recipe(), 4), chosen, processes=True))


@pytest.mark.parametrize(
    "layout",
    [
        Layout("split", 3, micro_batches=4),
        Layout("vee", 2, 2, micro_batches=3),
        Layout("late-first", 2, micro_batches=4),
        Layout("1f1b", 4, micro_batches=3, data_parallel=2, recompute="every"),
    ],
    ids=str,
)
def test_other_orders(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(monkeypatch)
    check(everywhere(watch, layout.ranks, transformer_case(Recipe(), layout.micro_batches), [layout]))


def test_a_contradiction_is_seen() -> None:
    """The witness itself: each lie is found."""
    row = build("1f1b", ranks=1, micro_batches=2).rows[0]
    calls = tuple(Call(action, 2.0 * i + 0.5, 2.0 * i + 1.0) for i, action in enumerate(row))
    spans = tuple((str(action), 2.0 * i, 2.0 * i + 1.5) for i, action in enumerate(row))
    starts, ends = tuple(s for _, s, _ in spans), tuple(e for *_, e in spans)
    true = Account(0, row, calls, starts, ends, 0.0, 8.0, spans)
    assert true.objections() == []
    other = Call(Action(0, Kind.F, 1), 0.5, 1.0)
    for lie in (
        replace(true, calls=calls[:-1]),
        replace(true, calls=(other, *calls[1:])),
        replace(true, calls=(*calls, other)),
        replace(true, calls=(calls[0]._replace(start=-1.0), *calls[1:])),
        replace(true, starts=(1.7, *starts[1:])),
        replace(true, end=6.0),
        replace(true, spans=(("0B0", *spans[0][1:]), *spans[1:])),
        replace(true, spans=((spans[0][0], 0.0, 2.0), *spans[1:])),
    ):
        assert lie.objections(), lie

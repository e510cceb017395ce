"""Schedules by name: what is found, what is declared, what is refused, and how others add their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from schedules import Action, Kind, Shape, build, facts, names, registry, schedule
from schedules.errors import DuplicateSchedule, ImpossibleShape, ScheduleError, UnknownOption, UnknownSchedule
from schedules.registry import Numbers, Stages


@pytest.fixture
def clean_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget afterwards what a test declares."""
    monkeypatch.setattr(registry, "_FACTS", dict(registry._FACTS))
    monkeypatch.setattr(registry, "_NAME_OF", dict(registry._NAME_OF))


def serial(shape: Shape, *, backwards: bool = True) -> Iterator[list[Action]]:
    """One micro-batch after the other.

    And more that nobody reads in a table.
    """
    kinds = (Kind.F, Kind.B) if backwards else (Kind.F,)
    for rank in range(shape.ranks):
        yield [Action(rank, kind, number) for number in range(shape.micro_batches) for kind in kinds]


def peak(ranks: int, stages_per_rank: int, micro_batches: int) -> float:
    return 1


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("1f1b", "1f1b"),
        ("1F1B", "1f1b"),
        ("Schedule1F1B", "1f1b"),
        ("GPipe", "gpipe"),
        ("ScheduleGPipe", "gpipe"),
        ("Interleaved1F1B", "interleaved-1f1b"),
        ("interleaved_1f1b", "interleaved-1f1b"),
        ("ScheduleInterleaved1F1B", "interleaved-1f1b"),
        ("forward_only", "forward-only"),
    ],
)
def test_names_are_found_however_they_are_spelt(given: str, found: str) -> None:
    assert facts(given).name == found
    assert build(given, ranks=2, micro_batches=2).name == found


@pytest.mark.parametrize(("given", "meant"), [("1f2b", "1f1b"), ("g-pip", "gpipe"), ("interleave-1f1b", "interleaved")])
def test_a_typo_is_answered_with_the_near_name(given: str, meant: str) -> None:
    with pytest.raises(UnknownSchedule, match=f"there is no schedule {given!r}; did you mean '{meant}"):
        build(given, ranks=2, micro_batches=2)


def test_a_name_unlike_any_is_answered_with_all() -> None:
    with pytest.raises(
        UnknownSchedule, match="set schedule to one of: 1f1b, 1f1b-eager, auto, breadth-first, chimera"
    ):
        build("nothing-like-it", ranks=2, micro_batches=2)


def test_what_is_declared() -> None:
    known = facts("interleaved-1f1b")
    assert known.doc == "1F1B with several stages a rank: a smaller bubble for a little more memory."
    assert known.placement == "loop"
    assert (str(known.stages_per_rank), known.stages_per_rank.default) == ("1 or more", 2)
    assert known.micro_batches.text == "any number of micro-batches"
    assert not known.splits_backward
    assert known.options == {}
    assert known.picture.startswith("Interleaved 1F1B")
    assert str(facts("1f1b").stages_per_rank) == "1"
    assert build("interleaved-1f1b", ranks=2, micro_batches=2).stages_per_rank == 2


def test_shapes_that_cannot_be() -> None:
    with pytest.raises(ImpossibleShape, match="1f1b holds 1 stages a rank, not 2; set stages_per_rank to 1, or "):
        build("1f1b", ranks=2, micro_batches=2, stages_per_rank=2)
    with pytest.raises(ImpossibleShape, match="schedule to 'interleaved-1f1b', which takes more"):
        build("1f1b", ranks=2, micro_batches=2, stages_per_rank=2)
    for wrong in ({"ranks": 0}, {"micro_batches": 0}, {"stages_per_rank": -1}, {"micro_batches": 1.5}):
        name, number = next(iter(wrong.items()))
        with pytest.raises(ImpossibleShape, match=f"gpipe: {name} is {number}; set it to a whole number, 1 or more"):
            build("gpipe", **{"ranks": 2, "micro_batches": 2, **wrong})  # type: ignore[arg-type]
    with pytest.raises(UnknownOption, match="gpipe has no option 'memory_cap'; its options are: none"):
        build("gpipe", ranks=2, micro_batches=2, memory_cap=3)


@pytest.mark.usefixtures("clean_registry")
def test_a_schedule_of_ones_own() -> None:
    schedule("serial", peak=peak, aliases=("OneByOne",))(serial)
    made = build("one-by-one", ranks=2, micro_batches=2)
    assert [" ".join(map(str, row)) for row in made.rows] == ["0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1"]
    assert build("serial", ranks=2, micro_batches=2, backwards=False).forward_only
    assert facts("serial").options == {"backwards": True}
    assert facts("serial").doc == "One micro-batch after the other."
    assert "serial" in names()


@pytest.mark.usefixtures("clean_registry")
def test_the_nearest_numbers_of_micro_batches_are_named() -> None:
    even = Numbers("an even number of micro-batches, 2 a rank or more", lambda p, v, m: m % 2 == 0 and m >= 2 * p)
    schedule("even", peak=peak, micro_batches=even)(serial)
    text = "even needs an even number of micro-batches, 2 a rank or more, not 9 with 3 ranks and 1 stages a rank; "
    with pytest.raises(ImpossibleShape, match=text + "set micro_batches to 8 or 10"):
        build("even", ranks=3, micro_batches=9)
    with pytest.raises(ImpossibleShape, match=r"set micro_batches to 6$"):
        build("even", ranks=3, micro_batches=1)
    with pytest.raises(ImpossibleShape, match=r"chimera needs an even number of ranks, not 5; set ranks to 4 or 6$"):
        build("chimera", ranks=5, micro_batches=8)
    never = Numbers("what does not exist", lambda p, v, m: False)
    schedule("never", peak=peak, micro_batches=never, stages_per_rank=Stages(2, 2, 3))(serial)
    with pytest.raises(ImpossibleShape, match="no number works with 3 ranks"):
        build("never", ranks=3, micro_batches=9)
    with pytest.raises(ImpossibleShape, match="never holds 2 to 3 stages a rank, not 1; set stages_per_rank to 2"):
        build("never", ranks=3, micro_batches=9, stages_per_rank=1)


@pytest.mark.usefixtures("clean_registry")
def test_a_wrong_order_is_caught_when_it_is_built() -> None:
    def wrong(shape: Shape) -> Iterator[list[Action]]:
        yield [Action(0, Kind.B, 0), Action(0, Kind.F, 0)]

    schedule("wrong", peak=peak)(wrong)
    with pytest.raises(ScheduleError, match="wrong: rank 0 runs 0B0 before 0F0"):
        build("wrong", ranks=1, micro_batches=1)


@pytest.mark.usefixtures("clean_registry")
def test_a_name_belongs_to_one_schedule() -> None:
    with pytest.raises(DuplicateSchedule, match=r"'1F1B' of .* is already taken by '1f1b' of schedules.library"):
        schedule("1F1B", peak=peak)(serial)
    with pytest.raises(DuplicateSchedule, match="give it another name or other aliases"):
        schedule("mine", peak=peak, aliases=("GPipe",))(serial)
    schedule("serial", peak=peak)(serial)
    schedule("serial", peak=peak)(serial)  # as a reload does


PLUGIN = '''
from schedules import Action, Kind, schedule

@schedule("serial", peak=lambda ranks, stages_per_rank, micro_batches: 1)
def serial(shape):
    """One micro-batch after the other."""
    for rank in range(shape.ranks):
        yield [Action(rank, kind, m) for m in range(shape.micro_batches) for kind in (Kind.F, Kind.B)]
'''

USE = """
import warnings
from schedules import build, names
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    print(names())
print(build("serial", ranks=2, micro_batches=2).rows[1][0])
print(caught[0].message)
"""


def test_other_packages_add_schedules_by_an_entry_point(tmp_path: Path) -> None:
    (tmp_path / "their_schedules.py").write_text(PLUGIN, encoding="utf-8")
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n", encoding="utf-8")
    points = "[pipeloom.schedules]\nbroken = not_a_module\ntheirs = their_schedules\n"
    (info / "entry_points.txt").write_text(points, encoding="utf-8")
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", USE],
        cwd=root,
        env={"PYTHONPATH": f"{root}:{tmp_path}", "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    listed, first, warning = result.stdout.splitlines()
    assert listed == str(tuple(sorted([*names(), "serial"])))
    assert first == "1F0"
    assert warning.startswith("the schedules of not_a_module cannot be used: ModuleNotFoundError")


def test_importing_schedules_stays_light() -> None:
    code = "import sys, schedules; print([m for m in ('torch', 'networkx', 'matplotlib', 'rich') if m in sys.modules])"
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env={"PYTHONPATH": str(root), "PATH": ""},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert result.stdout.strip() == "[]"

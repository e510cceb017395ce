"""The figure: panels on one time axis, rectangles to scale, bubbles named, bytes that repeat."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from schedules import Action, Costs, Kind, Pair, Schedule, Span, Timeline, build, simulate
from schedules.errors import MissingLibrary

pytest.importorskip("matplotlib")
from schedules.views import figure, palette


def words_of(axes: object) -> list[str]:
    return [text.get_text() for text in axes.texts]  # type: ignore[attr-defined]


def boxes_of(axes: object, colour: str) -> np.ndarray:
    """Left, right, top and bottom of the rectangles with this colour, sorted."""
    from matplotlib.colors import to_hex

    corners = [
        patch.get_path().vertices.reshape(-1, 5, 2)[:, [0, 2]].reshape(-1, 4)
        for patch in axes.patches  # type: ignore[attr-defined]
        if to_hex(patch.get_facecolor()) == colour.lower()
    ]
    found = np.concatenate(corners)[:, [0, 2, 1, 3]]
    return found[np.lexsort((found[:, 0], found[:, 2]))]


def test_rectangles_are_the_passes_to_scale() -> None:
    timeline = simulate(build("1f1b", ranks=2, micro_batches=3))
    rows, memory = figure.draw(timeline).axes
    forwards = boxes_of(rows, palette.shade(0, 0, 1))
    assert forwards[:, :2].tolist() == [[0, 1], [1, 2], [6, 7], [1, 2], [4, 5], [7, 8]]
    assert np.diff(forwards[:, 2:], axis=1) == pytest.approx(figure.ROW_FILL)
    assert rows.get_xlim() == memory.get_xlim() == (0, timeline.step_time)


def test_bubbles_are_hatched_and_named_and_ranks_say_their_idle_share() -> None:
    timeline = simulate(build("1f1b", ranks=4, micro_batches=8))
    rows = figure.draw(timeline).axes[0]
    hatched = {patch.get_hatch()[0] for patch in rows.patches if patch.get_hatch()}
    assert hatched == {"/", "\\"}
    assert {"warm-up", "drain"} <= set(words_of(rows))
    assert words_of(rows).count("27.3 %") == 4


def test_the_memory_curve_reaches_its_peak_on_every_rank() -> None:
    timeline = simulate(build("1f1b", ranks=4, micro_batches=8))
    lines = figure.draw(timeline).axes[1].lines
    assert [max(line.get_ydata()) for line in lines] == [4, 3, 2, 1]


def test_predicted_stands_over_measured_on_one_time_axis() -> None:
    predicted = simulate(build("1f1b", ranks=2, micro_batches=3))
    measured = Timeline.measured(
        predicted.schedule,
        [row * 1.5 for row in predicted.start],
        [row * 1.5 for row in predicted.end],
        other=[Span(0, "reduce", "REDUCE_GRAD 0", 18.0, 18.5), Span(0, "step", "STEP", 18.5, 19.0)],
    )
    drawn = figure.draw(predicted, over=measured)
    upper, _, lower, _ = drawn.axes
    assert upper.get_position().y0 > lower.get_position().y1
    assert upper.get_xlim() == lower.get_xlim() == (0, 19.0)
    assert "predicted 1f1b: 2 ranks, 3 micro-batches" in words_of(upper)
    assert "measured 1f1b: 2 ranks, 3 micro-batches" in words_of(lower)
    labels = {text.get_text() for legend in drawn.legends for text in legend.get_texts()}
    assert {"F forward", "B backward", "step", "reduce", "warm-up", "reduction", "imbalance"} <= labels


def test_the_halves_of_a_pair_share_a_row() -> None:
    f0, f1, b0, b1 = (Action(0, kind, m) for kind in (Kind.F, Kind.B) for m in range(2))
    timeline = simulate(Schedule.from_rows("paired", [[f0, Pair(f1, b0), b1]], [0]))
    rows = figure.draw(timeline).axes[0]
    half = figure.ROW_FILL / 2
    assert boxes_of(rows, palette.KINDS[0].colour).tolist() == [[0, 1, -half, half], [1, 4, -half, 0]]
    assert boxes_of(rows, palette.KINDS[1].colour).tolist() == [[4, 6, -half, half], [1, 4, 0, half]]


def test_more_ranks_than_rows_become_an_overview() -> None:
    rows = figure.draw(simulate(build("1f1b", ranks=100, micro_batches=20))).axes[0]
    (image,) = rows.images
    assert image.get_array().shape == (100, 1200, 3)
    assert {"warm-up", "drain"} <= set(words_of(rows))


def test_files_are_complete_and_the_same_every_time(tmp_path: Path) -> None:
    timeline = simulate(build("interleaved-1f1b", ranks=2, micro_batches=3), Costs(hop=0.1))
    for name in ("one.png", "two.png", "one.svg", "two.svg"):
        timeline.save(tmp_path / name, unit="")
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert ElementTree.parse(tmp_path / "one.svg").getroot().tag.endswith("svg")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.png", "one.svg", "two.png", "two.svg"]


def test_without_matplotlib_the_message_names_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingLibrary, match=r"pip install 'pipeloom\[viz\]', or save as \.html"):
        simulate(build("1f1b", ranks=2, micro_batches=3)).save(tmp_path / "x.png")
    assert not list(tmp_path.iterdir())

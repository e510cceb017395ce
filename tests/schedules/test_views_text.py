"""The terminal view: to scale, within its width, readable without colour and in ASCII."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules import Action, Costs, Kind, Pair, Schedule, Span, Timeline, build, simulate
from schedules.views import text
from tests.schedules.strategies import legal_schedules

ONE_F_ONE_B = """\
1f1b: 4 ranks, 8 micro-batches (predicted)
rank                                                                        idle
   0  F0F1F2F3╱╱╱╱╱╱╱╱╱╱╱╱B0──F4B1──F5B2──F6B3──F7B4──╲╲B5──╲╲B6──╲╲B7──   27.3%
   1  ╱╱F0F1F2╱╱╱╱╱╱╱╱B0──F3B1──F4B2──F5B3──F6B4──F7B5──╲╲B6──╲╲B7──╲╲╲╲   27.3%
   2  ╱╱╱╱F0F1╱╱╱╱B0──F2B1──F3B2──F4B3──F5B4──F6B5──F7B6──╲╲B7──╲╲╲╲╲╲╲╲   27.3%
   3  ╱╱╱╱╱╱F0B0──F1B1──F2B2──F3B3──F4B4──F5B5──F6B6──F7B7──╲╲╲╲╲╲╲╲╲╲╲╲   27.3%
      0                   10                  20                  30
step time 33, bubble 27.3 %, span bubble 27.3 %
idle: ╱ warm-up 13.6 %, ╲ drain 13.6 %
peak activations, in micro-batches a rank: 4, 3, 2, 1

F forward, B backward
bubble: idle share of ranks × step time; span bubble: of ranks × the longest
rank's own span"""


def rows_of(drawn: str) -> list[str]:
    """The cells of every row of ranks."""
    return [line[text.LABEL : -text.IDLE] for line in drawn.splitlines() if re.match(r" *\d+(…| ) .*%$", line)]


def test_one_f_one_b_is_drawn_as_it_runs() -> None:
    assert text.draw(simulate(build("1f1b", ranks=4, micro_batches=8)), unit="") == ONE_F_ONE_B


def test_a_rank_s_later_stages_are_in_lower_case() -> None:
    timeline = simulate(build("interleaved-1f1b", ranks=2, micro_batches=2), Costs(I=0.5, W=0.5))
    first, second = rows_of(text.draw(timeline, width=40))
    assert re.findall(r"[FBfb]\d", first) == ["F0", "F1", "f0", "f1", "b0", "b1", "B0", "B1"]
    assert re.findall(r"[FBfb]\d", second) == ["F0", "F1", "f0", "b0", "f1", "b1", "B0", "B1"]


def test_the_halves_of_a_pair_stand_in_one_box() -> None:
    f0, f1, b0, b1 = (Action(0, kind, m) for kind in (Kind.F, Kind.B) for m in range(2))
    timeline = simulate(Schedule.from_rows("paired", [[f0, Pair(f1, b0), b1]], [0]))
    (row,) = rows_of(text.draw(timeline))
    assert re.findall(r"[FBX0-9]+", row) == ["F0", "F1B0", "B1"]
    assert row.index("B1") - row.index("F1B0") == 3 * (row.index("F1B0") - row.index("F0"))


def test_what_a_measured_step_adds_is_drawn() -> None:
    schedule = build("1f1b", ranks=1, micro_batches=1)
    timeline = Timeline.measured(schedule, [[0.0, 1.0]], [[1.0, 3.0]], other=[Span(0, "step", "STEP", 3.5, 4.0)])
    drawn = text.draw(timeline, ascii=True)
    assert re.search(r"F0-+B0-+\.+S-+ +12.5%", drawn)
    assert "S optimizer step" in drawn
    assert "step time 4 s" in drawn
    assert ". host 12.5 %" in drawn


def test_two_timelines_share_a_time_axis_and_the_difference_is_said() -> None:
    gpipe, interleaved = (simulate(build(name, ranks=4, micro_batches=8)) for name in ("gpipe", "interleaved-1f1b"))
    drawn = text.draw(gpipe, over=interleaved, unit="")
    widths = [len(row.rstrip()) for row in rows_of(drawn)]
    assert max(widths[:4]) / max(widths[4:]) == pytest.approx(gpipe.step_time / interleaved.step_time, abs=0.02)
    assert "Interleaved-1f1b takes" in drawn


def test_colour_changes_nothing_but_colour() -> None:
    timeline = simulate(build("interleaved-1f1b", ranks=4, micro_batches=6), Costs(hop=0.3))
    coloured = text.draw(timeline, colour=True)
    assert "\x1b[" in coloured
    plain = re.sub(r"\x1b\[[\d;]*m", "", coloured)
    assert plain.replace("─", " ") == text.draw(timeline).replace("─", " ")


def test_many_ranks_become_an_overview() -> None:
    timeline = simulate(build("1f1b", ranks=128, micro_batches=64))
    drawn = text.draw(timeline)
    rows = rows_of(drawn)
    assert len(rows) == text.BANDS
    assert "how much of the time a rank works" in drawn
    assert "   4… " in drawn
    assert set("".join(rows)) <= set(text.LEVELS)


def test_nothing_takes_any_time() -> None:
    drawn = text.draw(simulate(build("gpipe", ranks=2, micro_batches=2), Costs(0, 0, 0)))
    assert "step time 0 s, bubble 0.0 %" in drawn


def test_times_have_the_prefix_that_fits() -> None:
    timeline = simulate(build("1f1b", ranks=2, micro_batches=2), Costs(F=0.02, I=0.02, W=0.02))
    drawn = text.draw(timeline)
    assert "step time 180 ms" in drawn
    assert "0 ms" in drawn
    assert "150 ms" in drawn


@given(legal_schedules(), st.integers(40, 120))
def test_any_schedule_can_be_drawn(schedule: Schedule, width: int) -> None:
    drawn = text.draw(simulate(schedule, Costs(hop=0.2)), width=width)
    assert len(rows_of(drawn)) == schedule.ranks
    assert max(map(len, drawn.splitlines())) <= width


@given(
    name=st.sampled_from(("gpipe", "1f1b", "interleaved-1f1b", "forward-only")),
    ranks=st.integers(1, 8),
    micro_batches=st.integers(1, 40),
    width=st.integers(40, 160),
    hop=st.sampled_from((0.0, 0.1, 0.7)),
)
def test_every_row_fits_and_is_to_scale(name: str, ranks: int, micro_batches: int, width: int, hop: float) -> None:
    timeline = simulate(build(name, ranks=ranks, micro_batches=micro_batches), Costs(F=1.0, I=0.7, W=0.6, hop=hop))
    drawn = text.draw(timeline, width=width, ascii=True)
    assert drawn.isascii()
    assert max(map(len, drawn.splitlines())) <= width
    rows = rows_of(drawn)
    assert len(rows) == ranks
    if "how much of the time" in drawn:
        return
    scale = max(len(row.rstrip()) for row in rows) / timeline.step_time
    for row, busy, entries in zip(rows, timeline.busy, timeline.schedule.rows, strict=True):
        columns = len(re.findall(r"[FBfb\d-]", row))
        assert columns == pytest.approx(busy * scale, abs=len(entries) + busy / timeline.step_time)

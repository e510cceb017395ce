"""The page: one file, complete without a network, true to the timeline, and drawn by a real browser without a word."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import check_page
from schedules import Action, Costs, Kind, Pair, Schedule, Span, Timeline, build, simulate
from schedules.views import page


def parts_of(drawn: str) -> tuple[dict[str, Any], bytes]:
    """What the scripts of a page read."""
    data = re.search(r'<script id="data"[^>]*>(.*?)</script>', drawn, re.DOTALL)
    numbers = re.search(r'<script id="numbers"[^>]*>(.*?)</script>', drawn, re.DOTALL)
    assert data
    assert numbers
    return json.loads(data[1]), zlib.decompress(base64.b64decode(numbers[1]))


def array(numbers: bytes, place: list[int], form: str) -> np.ndarray:
    return np.frombuffer(numbers, form, offset=place[0], count=place[1])


def measured_of(predicted: Timeline) -> Timeline:
    """A step in which everything took a fifth longer, with reductions and optimizer steps behind."""
    start, end = ([row * 1.2 for row in rows] for rows in (predicted.start, predicted.end))
    last = max(float(row[-1]) for row in end)
    ranks = range(predicted.schedule.ranks)
    other = [Span(rank, "reduce", f"REDUCE_GRAD {rank}", last, last + 0.5) for rank in ranks]
    other += [Span(rank, "step", "STEP", last + 0.5, last + 1.0) for rank in ranks]
    return Timeline.measured(predicted.schedule, start, end, other=other)


def test_what_is_packed_is_the_timeline() -> None:
    timeline = simulate(build("interleaved-1f1b", ranks=3, micro_batches=5), Costs(hop=0.1))
    data, numbers = parts_of(page.draw(timeline))
    (packed,) = data["timelines"]
    for rank, row in enumerate(packed["rows"]):
        assert array(numbers, row["start"], "<u4") * data["end"] / page.TICKS == pytest.approx(timeline.start[rank])
        assert array(numbers, row["end"], "<u4") * data["end"] / page.TICKS == pytest.approx(timeline.end[rank])
        names = [kind["name"] for kind in data["kinds"]]
        columns = zip(*(array(numbers, row[key], form) for key, form in FORMS.items()), strict=True)
        assert [f"{stage}{names[kind]}{batch}" for stage, kind, batch in columns] == [
            str(entry) for entry in timeline.schedule.rows[rank]
        ]
        assert array(numbers, row["memory"]["live"], "<f4").max() == timeline.peak_activations[rank]
        causes = dict(zip((cause["name"] for cause in data["causes"]), row["causes"], strict=True))
        assert causes == pytest.approx(dict(timeline.idle_by_cause[rank]))


FORMS = {"stage": "<u4", "kind": "u1", "batch": "<u4"}


def test_the_numbers_stand_in_tables_too() -> None:
    drawn = page.draw(simulate(build("1f1b", ranks=4, micro_batches=8)), unit="")
    for cell in ("4 ranks, 8 micro-batches", "33", "27.3 %", "step time", "bubble", "span bubble", "warm-up", "drain"):
        assert cell in drawn


def test_the_page_asks_for_nothing_and_a_name_cannot_end_its_script() -> None:
    schedule = Schedule.from_rows('</script><script>alert("1")</script>', [[Action(0, Kind.F, 0)]], [0])
    drawn = page.draw(simulate(schedule))
    assert 'alert("1")' not in drawn
    assert drawn.count("<script") == drawn.count("</script>") == 3
    assert "default-src 'none'" in drawn
    assert not re.findall(r"https?://|\bsrc=|@import|url\(", drawn)


def test_large_steps_are_packed_in_part_and_overviewed_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MOST_PASSES", 2000)
    timeline = simulate(build("1f1b", ranks=100, micro_batches=50))
    data, numbers = parts_of(page.draw(timeline))
    (packed,) = data["timelines"]
    ranks = [row["rank"] for row in packed["rows"]]
    assert len(ranks) == 20
    assert (ranks[0], ranks[-1]) == (0, 99)
    overview = packed["overview"]
    cells = array(numbers, overview["cells"], "u1").reshape(overview["rows"], overview["columns"], -1)
    assert cells.sum() / 255 / cells[..., 0].size == pytest.approx(1 - timeline.bubble, abs=0.01)


# In a real browser.


@pytest.fixture(scope="module")
def browser() -> Iterator[check_page.Browser]:
    try:
        check_page.find_browser()
    except check_page.NoBrowser as error:
        pytest.skip(str(error))
    with check_page.browser() as session:
        yield session


@pytest.fixture
def shown(browser: check_page.Browser, tmp_path: Path) -> Callable[..., check_page.Browser]:
    """Show a timeline, or HTML, and fail on whatever the page does not do well."""

    def show(timeline: Timeline | str, **options: Any) -> check_page.Browser:
        path = tmp_path / "page.html"
        if isinstance(timeline, str):
            path.write_text(timeline)
        else:
            timeline.save(path, **options)
        check_page.open_page(browser, path)
        browser.evaluate("new Promise(done => setTimeout(done, 50))")
        if faults := check_page.faults(browser, path):
            raise check_page.PageFault("; ".join(faults))
        return browser

    return show


def point_at(browser: check_page.Browser, timeline: int, rank: int, time: float) -> str:
    """Move the pointer to a time in a row, and return what the tip says."""
    place = browser.evaluate(f"""(() => {{
        const item = layout.items.find(one => one.what === "row" && one.row.rank === {rank}
            && one.timeline === page.timelines[{timeline}]);
        const box = $("rows").getBoundingClientRect();
        return [box.left + scale({time}), box.top + item.y + item.height / 4];
    }})()""")
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])
    browser.evaluate("new Promise(done => requestAnimationFrame(done))")
    return str(browser.evaluate('$("tip").hidden ? "" : $("tip").innerText'))


def test_the_browser_check_sees_requests_errors_and_exceptions(shown: Callable[..., Any]) -> None:
    ready = '<script>document.documentElement.dataset.ready = "true"</script>'
    shown(f"<!doctype html><title>good</title>{ready}")
    for fault, sentence in (
        ('<img src="http://127.0.0.1:9/x.png">', "asked for http://127.0.0.1:9/x.png"),
        ('<script>console.error("oh no")</script>', "console error: oh no"),
        ("<script>undefinedName()</script>", "ReferenceError: undefinedName is not defined"),
    ):
        with pytest.raises(check_page.PageFault, match=re.escape(sentence)):
            shown(f"<!doctype html><title>bad</title>{fault}{ready}")


@pytest.mark.parametrize(("name", "ranks", "micro_batches"), [("1f1b", 1, 1), ("gpipe", 4, 8), ("forward-only", 3, 2)])
def test_pages_are_drawn(shown: Callable[..., Any], name: str, ranks: int, micro_batches: int) -> None:
    session = shown(simulate(build(name, ranks=ranks, micro_batches=micro_batches)))
    rows = session.evaluate('layout.items.filter(item => item.what === "row").length')
    assert rows == ranks
    blank = '$("rows").getContext("2d").getImageData(0, 0, $("rows").width, $("rows").height).data.every(v => v === 0)'
    assert session.evaluate(blank) is False


def test_the_tip_explains_passes_and_bubbles(shown: Callable[..., Any]) -> None:
    timeline = simulate(build("1f1b", ranks=4, micro_batches=8))
    session = shown(timeline, over=measured_of(timeline), unit="")
    assert " ".join(point_at(session, 0, 2, 20.5).split()) == (
        "2F6: forward, micro-batch 6, stage 2 from – to 20 – 21 takes 1 memory at its start 2 live "
        "measured 1f1b 24, takes 1.2 (20.0 %)"
    )
    bubble = point_at(session, 0, 1, 6.0)
    assert "rank 1 idle, warm-up: before its first backward" in bubble
    assert "waits for\n2B0" in bubble
    assert "idle before it\n4, warm-up (for 2B0)" in point_at(session, 0, 1, 8.5)
    assert "optimizer step" in point_at(session, 1, 0, timeline.step_time * 1.2 + 0.75)


def test_the_halves_of_a_pair_are_told_apart(shown: Callable[..., Any]) -> None:
    f0, f1, b0, b1 = (Action(0, kind, m) for kind in (Kind.F, Kind.B) for m in range(2))
    session = shown(simulate(Schedule.from_rows("paired", [[f0, Pair(f1, b0), b1]], [0])))
    assert "0F1: forward, micro-batch 1, stage 0 (runs as one: 0F1 + 0B0)" in point_at(session, 0, 0, 2.0)


def test_zoom_and_rows_by_rank(shown: Callable[..., Any]) -> None:
    timeline = simulate(build("interleaved-1f1b", ranks=4, micro_batches=8), Costs(hop=0.2))
    session = shown(timeline, over=measured_of(timeline))
    session.call("Input.dispatchKeyEvent", type="keyDown", key="+")
    session.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert session.evaluate("(state.to - state.from) / page.end") == pytest.approx(0.6)
    session.evaluate('$("by-rank").click(); $("critical").click(); $("fit").click()')
    session.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert session.evaluate("[state.from, state.to / page.end]") == [0, 1]
    order = session.evaluate('layout.items.filter(item => item.what === "row").map(item => item.row.rank)')
    assert order == [0, 0, 1, 1, 2, 2, 3, 3]


def test_many_ranks_have_an_overview_that_moves_the_window(shown: Callable[..., Any]) -> None:
    session = shown(simulate(build("1f1b", ranks=96, micro_batches=128)))
    first = 'layout.items.filter(item => item.what === "row").map(item => item.row.rank)[0]'
    assert session.evaluate(first) == 0
    x, y = session.evaluate("""(() => {
        const box = $("overview-0").getBoundingClientRect();
        return [box.left + box.width / 2, box.top + box.height / 2 + 10];
    })()""")
    session.call("Input.dispatchMouseEvent", type="mousePressed", x=x, y=y, button="left", buttons=1, clickCount=1)
    session.call("Input.dispatchMouseEvent", type="mouseReleased", x=x, y=y, button="left", clickCount=1)
    session.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert session.evaluate(first) == pytest.approx(40, abs=3)

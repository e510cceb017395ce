"""The example that draws schedules."""

from __future__ import annotations

from pathlib import Path

import pytest
import timelines

from tests.examples.launch import EXAMPLES, output_of


def test_step_times_are_the_closed_forms() -> None:
    ranks, micro_batches, hops = 4, 8, 2 * 3 * 0.05  # a step waits for each hop there and back once
    assert timelines.predict("gpipe").step_time == pytest.approx((micro_batches + ranks - 1) * 3 + hops)
    assert timelines.predict("gpipe").peak_activations == (8, 8, 8, 8)
    assert timelines.predict("1f1b").peak_activations == (4, 3, 2, 1)


def test_a_slow_last_rank_shows_as_imbalance_on_all_others() -> None:
    slow = timelines.predict("1f1b", last=1.5)
    assert [max(by, key=by.__getitem__) for by in slow.idle_by_cause[:3]] == ["imbalance"] * 3
    assert "imbalance" in timelines.row(slow)


def test_it_writes_a_table_a_drawing_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timelines.main(tmp_path / "all.html")
    output = capsys.readouterr().out
    assert "gpipe              33.30    27.9 %    8.00   warm-up 18.1 %\n" in output
    assert "Interleaved-1f1b takes 12.3 % less time than gpipe" in output
    assert (tmp_path / "all.html").read_text().count("interleaved-1f1b") > 0


def test_it_needs_no_torch(tmp_path: Path) -> None:
    script = tmp_path / "probe.py"
    imports = f"import sys\nsys.path.insert(0, {str(EXAMPLES)!r})\nimport timelines\n"
    script.write_text(imports + "print('torch' in sys.modules)\n")
    assert output_of(script) == "False\n"

"""The example of a schedule in a file of its own, imported and by entry point; in processes, since it registers one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.examples.launch import EXAMPLES, output_of


def test_it_is_checked_drawn_and_run_with_the_bits_of_1f1b() -> None:
    lines = output_of("custom_schedule.py").splitlines()
    assert lines[0].startswith("weights-last: 1F1B whose weight gradients come last")
    assert "weights-last   step   24, peak 6 micro-batches" in lines  # m(F + I + W) + (p - 1)(F + I)
    assert any(line.startswith("   3  ╱╱╱╱╱╱╱╱╱F0─I0─F1─I1─") for line in lines)
    assert lines[-1] == "the same bits"
    losses = [line.split()[1:] for line in lines if line.startswith(("1f1b           1.", "weights-last   1."))]
    assert len(losses) == 2
    assert losses[0] == losses[1]


def pipeloom(installed: Path, *arguments: str) -> str:
    """What the command writes where a package with this entry point is installed."""
    info = installed / "custom-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: custom\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[pipeloom.schedules]\nmine = custom_schedule\n", encoding="utf-8")
    path = os.pathsep.join(map(str, (EXAMPLES.parent, EXAMPLES, installed)))
    command = [sys.executable, "-m", "pipeline.cli", *arguments]
    environment = os.environ | {"PYTHONPATH": path, "COLUMNS": "100"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=100).stdout


def test_the_command_lists_and_draws_it_by_its_entry_point(tmp_path: Path) -> None:
    listed = {facts["name"]: facts for facts in json.loads(pipeloom(tmp_path, "schedules", "--json"))}
    assert listed["weights-last"]["splits_backward"] is True
    shape = ("--ranks", "4", "--micro-batches", "6")
    drawn = pipeloom(tmp_path, "timeline", "--schedule", "weights-last", *shape)
    assert "step time 24" in drawn


def test_it_is_short() -> None:
    assert len((EXAMPLES / "custom_schedule.py").read_text(encoding="utf-8").splitlines()) < 150

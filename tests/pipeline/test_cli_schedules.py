"""``pipeloom schedules``, ``timeline`` and ``compare``: what they print, write and refuse, and what they import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import schedules
from pipeline import cli

ROOT = Path(__file__).parents[2]


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command that succeeds prints."""
    code = cli.main(arguments)
    captured = capsys.readouterr()
    assert (code, captured.err) == (0, "")
    return captured.out


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which a command refuses."""
    code = cli.main(arguments)
    captured = capsys.readouterr()
    assert (code, captured.out) == (cli.BAD_INPUT, "")
    assert captured.err.count("\n") == 1
    return captured.err.strip()


def test_schedules_are_listed_as_they_are_declared(capsys: pytest.CaptureFixture[str]) -> None:
    table = output(capsys, "schedules")
    assert max(map(len, table.splitlines())) <= 80
    listed = json.loads(output(capsys, "schedules", "--json"))
    assert [facts["name"] for facts in listed] == list(schedules.names())
    for facts in listed:
        assert facts["name"] in table
        assert all(alias in table for alias in facts["aliases"])
    (interleaved,) = (facts for facts in listed if facts["name"] == "interleaved-1f1b")
    assert interleaved["stages_per_rank"] == {"default": 2, "least": 1, "most": None}
    assert interleaved["splits_backward"] is False


def test_a_timeline_is_drawn_in_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    drawn = output(capsys, "timeline", "--schedule", "1f1b", "--ranks", "4", "--micro-batches", "8")
    assert "   3  ╱╱╱╱╱╱F0B0──F1B1──F2B2──F3B3──F4B4──F5B5──F6B6──F7B7──╲╲╲╲╲╲╲╲╲╲╲╲   27.3%" in drawn
    assert "step time 33, bubble 27.3 %, span bubble 27.3 %" in drawn
    assert "\x1b" not in drawn
    assert output(capsys, "timeline", "--ascii").isascii()
    assert "\x1b[" in output(capsys, "timeline", "--color", "always")


def test_costs_are_those_of_a_rank_whatever_its_stages(capsys: pytest.CaptureFixture[str]) -> None:
    for name, step in (("1f1b", 33.0), ("interleaved-1f1b", 28.5)):
        numbers = json.loads(output(capsys, "timeline", "--schedule", name, "--json"))
        assert numbers["step_time"] == pytest.approx(step)
        assert sum(numbers["idle_by_cause"][0].values()) == pytest.approx(numbers["idle"][0])
    assert numbers["stages_per_rank"] == 2
    assert numbers["costs"] == {"F": 1.0, "I": 1.0, "W": 1.0, "hop": 0.0}


def test_costs_may_have_units(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("timeline", "--ranks", "2", "--micro-batches", "2", "--F", "20ms", "--W", "0.01s", "--hop", "500us")
    assert "step time 151 ms" in output(capsys, *options)
    numbers = json.loads(output(capsys, *options, "--json"))
    assert numbers["costs"] == pytest.approx({"F": 0.02, "I": 0.02, "W": 0.01, "hop": 0.0005})


def test_schedules_are_compared_on_one_axis_with_the_difference_in_words(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ("compare", "gpipe", "interleaved-1f1b:3", "--ranks", "8", "--micro-batches", "16")
    drawn = output(capsys, *options, "--save", str(tmp_path / "both.html"))
    assert "Interleaved-1f1b takes 20.3 % less time than gpipe" in drawn
    assert "gpipe over interleaved-1f1b" in (tmp_path / "both.html").read_text()
    numbers = json.loads(output(capsys, *options, "--json"))
    gpipe, interleaved = numbers["timelines"]
    assert gpipe["bubble"] == pytest.approx(21 / 69)
    assert interleaved["bubble"] == pytest.approx(7 / 55)
    assert len(numbers["differences"]) == 1


def test_stages_per_rank_are_for_schedules_that_can_hold_them(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("compare", "1f1b", "interleaved-1f1b", "--stages-per-rank", "3", "--json")
    stages = [timeline["stages_per_rank"] for timeline in json.loads(output(capsys, *options))["timelines"]]
    assert stages == [1, 3]


def test_a_csv_file_is_a_schedule(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    schedules.build("gpipe", ranks=3, micro_batches=2).to_csv(path)
    numbers = json.loads(output(capsys, "timeline", "--schedule", str(path), "--json"))
    assert (numbers["schedule"], numbers["ranks"], numbers["micro_batches"]) == ("mine", 3, 2)
    assert "has ranks 3, not 4; leave out --ranks" in refusal(
        capsys, "timeline", "--schedule", str(path), "--ranks", "4"
    )


@pytest.mark.parametrize("name", ["x.html", "x.png", "x.svg", "x.json"])
def test_pictures_are_saved_by_suffix(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    output(capsys, "timeline", "--save", str(tmp_path / name))
    assert (tmp_path / name).stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("timeline --schedule 1f1c", "timeline: there is no schedule '1f1c'; did you mean '1f1b'?"),
        ("timeline --micro-batches 0", "argument --micro-batches: '0' is not a whole number, 1 or more"),
        ("timeline --ranks two", "argument --ranks: 'two' is not a whole number"),
        (
            "timeline --save x.pdf",
            "cannot save a timeline as 'x.pdf'; let the name end in one of .html, .png, .svg, .json",
        ),
        ("timeline --save /nowhere/x.html", "cannot write /nowhere/x.html: No such file or directory"),
        ("timeline --stages-per-rank 2", "set stages_per_rank to 1, or schedule to 'interleaved-1f1b'"),
        ("timeline --F -1", "argument --F: '-1' is not a time: write a number, 0 or more, or one with s, ms or us"),
        ("timeline --F 20ms --hop 3", "--hop has no unit and others have; write all of them like 20ms, or none"),
        ("timeline --hop 1ms", "--F is missing"),
        ("timeline --schedule missing.csv", "missing.csv: No such file or directory"),
        ("timeline --colour", "unrecognized arguments: --colour"),
        ("compare 1f1b", "one schedule is nothing to compare"),
        ("compare 1f1b gpipe:0", "gpipe: stages_per_rank is 0; set it to a whole number, 1 or more"),
        ("frobnicate", "argument COMMAND: invalid choice: 'frobnicate'"),
        ("", "the following arguments are required: COMMAND"),
    ],
)
def test_bad_input_is_refused_in_one_line(capsys: pytest.CaptureFixture[str], arguments: str, sentence: str) -> None:
    line = refusal(capsys, *arguments.split())
    assert line.startswith("pipeloom")
    assert sentence in line


@pytest.mark.parametrize("command", ["schedules", "timeline", "compare"])
def test_every_option_has_help(capsys: pytest.CaptureFixture[str], command: str) -> None:
    parser, _ = cli._parser([command])
    (choices,) = (action.choices for action in parser._actions if action.choices and action.dest == "command")
    assert all(action.help for action in choices[command]._actions)
    assert "--json" in output(capsys, command, "--help")


def test_drawing_imports_neither_torch_nor_anything_else_slow() -> None:
    script = """
import contextlib, io, sys
from pipeline.cli import main
with contextlib.redirect_stdout(io.StringIO()):
    codes = [main(["schedules"]), main(["timeline"]), main(["compare", "gpipe", "1f1b"])]
print(codes, sorted({"torch", "networkx", "matplotlib", "pydantic"} & sys.modules.keys()))
"""
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[0, 0, 0] []"


@pytest.mark.parametrize("arguments", ["timeline --ranks 64", "schedules --json", "--help"])
def test_a_reader_that_goes_away_is_no_error(arguments: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "pipeline.cli", *arguments.split()]
    result = subprocess.run(command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert result.stderr == b""
    assert result.returncode in (0, cli.CLOSED_PIPE)


def test_auto_tells_what_it_was_made_from(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("--ranks", "3", "--micro-batches", "5", "--stages-per-rank", "1", "--hop", "0.3", "--memory-cap", "4")
    told = output(capsys, "timeline", "--schedule", "auto", *shape)
    assert "above the bound; made from " in told
    assert "peak activations, in micro-batches a rank: 4" in told
    assert "made from" not in output(capsys, "timeline", "--schedule", "zb-h1")

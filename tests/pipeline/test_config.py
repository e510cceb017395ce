"""PipelineConfig: what it takes, from where, and the sentence with which it refuses."""

from __future__ import annotations

import argparse
import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.config import PipelineConfig
from pipeline.errors import ConfigError

ROOT = Path(__file__).parents[2]

TOML = """
schedule = "interleaved-1f1b"
stages_per_rank = 2
partition = [0, 3, 7]
[schedule_options]
group = 4
"""
YAML = """
schedule: interleaved-1f1b
stages_per_rank: 2
partition: [0, 3, 7]
schedule_options: {group: 4}
"""
JSON = """
{
  "schedule": "interleaved-1f1b",
  "stages_per_rank": 2,
  "partition": [0, 3, 7],
  "schedule_options": {"group": 4}
}
"""
WRITTEN = PipelineConfig(
    schedule="interleaved-1f1b", stages_per_rank=2, partition=(0, 3, 7), schedule_options={"group": 4}
)


def refusal(**settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        PipelineConfig(**settings)
    return str(caught.value)


def output_of(code: str, **variables: str) -> str:
    """What a new Python process prints."""
    command = [sys.executable, "-c", f"from pipeline.config import PipelineConfig\nprint({code})"]
    return subprocess.check_output(command, env=os.environ | variables, cwd=ROOT, text=True).strip()


# ---- where settings come from


def test_defaults() -> None:
    config = PipelineConfig()
    assert (config.schedule, config.micro_batches, config.data_parallel) == ("1f1b", 8, 1)
    assert (config.stages_per_rank, config.partition, config.seed) == (None, "profile", 0)
    assert PipelineConfig.load() == config


@pytest.mark.parametrize(("suffix", "text"), [("toml", TOML), ("yaml", YAML), ("yml", YAML), ("json", JSON)])
def test_file_formats_say_the_same(tmp_path: Path, suffix: str, text: str) -> None:
    path = tmp_path / f"train.{suffix}"
    path.write_text(text)
    assert PipelineConfig.load(path) == PipelineConfig.load(str(path)) == WRITTEN


@pytest.mark.parametrize("suffix", ["toml", "yaml"])
def test_an_empty_file_is_the_defaults(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"empty.{suffix}"
    path.write_text("")
    assert PipelineConfig.load(path) == PipelineConfig()


def test_a_config_and_a_mapping_load_as_they_are() -> None:
    assert PipelineConfig.load(WRITTEN) == WRITTEN
    assert PipelineConfig.load({"seed": 3}) == PipelineConfig(seed=3)


def test_the_environment_is_not_read() -> None:
    here = PipelineConfig().digest()
    assert output_of("PipelineConfig.load().digest()", SEED="7", TIMEOUT="1", SCHEDULE="gpipe") == here


# ---- the command line


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (["--schedule", "gpipe"], {"schedule": "gpipe"}),
        (["--schedule=gpipe", "--seed=3"], {"schedule": "gpipe", "seed": 3}),
        (["--stages-per-rank", "None"], {"stages_per_rank": None}),
        (["--gradient-clipping", "1"], {"gradient_clipping": 1.0}),
        (["--reference-numerics"], {"reference_numerics": True}),
        (["--no-reference-numerics"], {"reference_numerics": False}),
        (["--partition", "0,3,7"], {"partition": (0, 3, 7)}),
        (["--partition", "[0, 3, 7]"], {"partition": (0, 3, 7)}),
        (["--partition", "type:Block{1,2}"], {"partition": "type:Block{1,2}"}),
        (["--recompute", "2,0"], {"recompute": (0, 2)}),
        (["--recompute", "every:2"], {"recompute": "every:2"}),
        (["--profile", "costs.json"], {"profile": Path("costs.json")}),
        (
            ["--schedule-options", "a=1,b=true", "--schedule-options", "c=0.5", "--schedule-options", "d=x"],
            {"schedule_options": {"a": 1, "b": True, "c": 0.5, "d": "x"}},
        ),
    ],
)
def test_words_of_the_command_line(words: list[str], settings: dict[str, Any]) -> None:
    assert PipelineConfig.load(None, words) == PipelineConfig(**settings)
    parser = argparse.ArgumentParser()
    PipelineConfig.add_arguments(parser)
    assert PipelineConfig.load(None, parser.parse_args(words)) == PipelineConfig(**settings)


def test_the_command_line_goes_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_text(TOML)
    config = PipelineConfig.load(path, ["--stages-per-rank", "3", "--schedule-options", "depth=2"])
    assert config.differences(WRITTEN) == ("schedule_options", "stages_per_rank")
    assert config.stages_per_rank == 3
    assert config.schedule_options == {"group": 4, "depth": 2}


def test_a_parser_keeps_its_own_options_and_describes_every_setting() -> None:
    parser = argparse.ArgumentParser()
    train = parser.add_subparsers().add_parser("train")
    train.add_argument("--data")
    PipelineConfig.add_arguments(train)
    arguments = parser.parse_args(["train", "--data", "words.txt", "--micro-batches", "4"])
    assert arguments.data == "words.txt"
    assert PipelineConfig.load({"seed": 1}, arguments) == PipelineConfig(seed=1, micro_batches=4)
    text = " ".join(train.format_help().split())
    for name, field in PipelineConfig.model_fields.items():
        assert f"--{name.replace('_', '-')}" in text
        assert field.description is not None
        assert " ".join(field.description.split()) in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shedule", "gpipe"], "there is no option --shedule; did you mean '--schedule'?"),
        (["--seed"], "argument --seed: expected one argument"),
        (["gpipe"], "unrecognized arguments: gpipe"),
        (["--seed", "-1"], "seed = '-1' is not possible: it must be greater than or equal to 0 (default: 0)"),
    ],
)
def test_a_wrong_word_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PipelineConfig.load(None, words)
    assert str(caught.value) == message


# ---- what is refused, and how


@pytest.mark.parametrize(
    "name", ["stages_per_rank", "micro_batches", "data_parallel", "profile_runs", "threads"]
)
def test_counts_start_at_one(name: str) -> None:
    expected = f"{name} = 0 is not possible: it must be greater than or equal to 1 (default: "
    assert refusal(**{name: 0}).startswith(expected)
    assert getattr(PipelineConfig(**{name: 1}), name) == 1


@pytest.mark.parametrize(
    ("name", "given", "allowed"),
    [
        ("micro_batches", 2.5, "it must be a valid integer, got a number with a fractional part"),
        ("micro_batches", "x", "it must be a valid integer, unable to parse string as an integer"),
        ("seed", -1, "it must be greater than or equal to 0"),
        ("seed", 2**63, "it must be less than 9223372036854775808"),
        ("receive_ahead", -1, "it must be greater than or equal to 0"),
        ("gradient_clipping", 0, "it must be greater than 0"),
        ("gradient_clipping", float("inf"), "it must be a finite number"),
        ("timeout", 0, "it must be greater than 0"),
        ("nonfinite_loss", "rais", "it must be 'ignore', 'raise', 'skip' or 'rollback'"),
        ("schedule", None, "it must be a valid string"),
        ("schedule_options", [1], "it must be a valid dictionary"),
        ("partition", "type:", "after type: must stand the type of a layer, as in type:Block"),
        ("partition", "type:{}?(", "after type: must stand a regular expression (missing ), un"),
        ("recompute", "every:0", "it must be none, auto, every, every:N with N at least 1, or layer numbers"),
    ],
)
def test_a_refusal_says_what_was_given_what_is_allowed_and_the_default(
    name: str, given: Any, allowed: str
) -> None:
    message = refusal(**{name: given})
    assert message.startswith(f"{name} = {given!r} is not possible: {allowed}")
    assert message.endswith(f" (default: {PipelineConfig.model_fields[name].default!r})")
    assert "\n" not in message


def test_a_nearly_right_method_is_named() -> None:
    assert refusal(partition="profil") == (
        "partition = 'profil' is not possible: it must be one of profile, parameters, uniform, or "
        "type:REGEX, or numbers of layers in rising order as in 0,3,7; did you mean 'profile'? "
        "(default: 'profile')"
    )


@pytest.mark.parametrize("cuts", [[0, 3, 2], [-1, 3], [0.5], ["a"], [], 3, None])
def test_cut_points_are_rising_layer_numbers(cuts: Any) -> None:
    assert "numbers of layers in rising order as in 0,3,7" in refusal(partition=cuts)


def test_equal_cut_points_leave_a_stage_empty() -> None:
    assert PipelineConfig(partition=[0, 3, 3, 7]).partition == (0, 3, 3, 7)


def test_an_option_of_the_schedule_is_one_value() -> None:
    assert refusal(schedule_options={"depth": [1]}) == (
        "schedule_options.depth = [1] is not possible: it must be a number, a word, true or false"
    )


def test_an_unknown_setting_names_the_near_one_or_all() -> None:
    assert refusal(microbatches=4) == "there is no setting 'microbatches'; did you mean 'micro_batches'?"
    assert refusal(qqq=4) == f"there is no setting 'qqq'; there are: {', '.join(PipelineConfig.model_fields)}"


def test_every_wrong_setting_is_named_at_once() -> None:
    first, second = refusal(threads=0, sed=1).split("; ", 1)
    assert first.startswith("threads = 0")
    assert second.startswith("there is no setting 'sed'")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("train.ini", "", "the name of a configuration file must end in .toml, .yaml, .yml, .json"),
        ("train.toml", "seed = ", "is no valid TOML (Invalid value (at end of document))"),
        ("train.json", "[1]", "must hold settings by name, not a list"),
        ("train.toml", "seed = 1.5", "seed = 1.5 is not possible: it must be a valid integer, got a number"),
        ("train.yaml", "sed: 1", "there is no setting 'sed'; did you mean 'seed'?"),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        PipelineConfig.load(path)
    assert str(caught.value).startswith(f"{path}: {message}")


def test_a_broken_yaml_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("seed: [1")
    with pytest.raises(ConfigError, match=r"train\.yaml: is no valid YAML \(.*line 1, column 9") as caught:
        PipelineConfig.load(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_source_of_another_kind() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml: cannot be read \(No such file or directory\)"):
        PipelineConfig.load("nowhere.toml")
    with pytest.raises(ConfigError, match="mapping, or the path of a TOML, YAML or JSON file, not a list"):
        PipelineConfig.load([])  # type: ignore[arg-type]


# ---- one object on every rank


def test_different_ways_to_say_the_same_are_equal() -> None:
    assert PipelineConfig(recompute="every:1") == PipelineConfig(recompute="every")
    assert PipelineConfig(recompute=[3, 1, 3]) == PipelineConfig(recompute="1,3")
    assert PipelineConfig(partition=[0, 3]) == PipelineConfig(partition="0,3")


def test_it_is_frozen() -> None:
    config = PipelineConfig()
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 1  # type: ignore[misc]


def test_copies_are_equal_and_hash_alike() -> None:
    for twin in (copy.deepcopy(WRITTEN), pickle.loads(pickle.dumps(WRITTEN)), PipelineConfig.load(WRITTEN)):
        assert twin == WRITTEN
        assert hash(twin) == hash(WRITTEN)
        assert twin.digest() == WRITTEN.digest()


def test_the_digest_is_the_same_in_every_process() -> None:
    code = "PipelineConfig(schedule_options={'b': 1, 'a': 2}).digest()"
    assert output_of(code, PYTHONHASHSEED="1") == PipelineConfig(schedule_options={"a": 2, "b": 1}).digest()


def test_every_setting_counts_in_digest_and_differences() -> None:
    others: dict[str, Any] = {
        "schedule": "gpipe",
        "schedule_options": {"a": 1},
        "stages_per_rank": 2,
        "micro_batches": 4,
        "global_batch": 64,
        "micro_batch": 8,
        "data_parallel": 2,
        "zero": 1,
        "mesh_inside": "data",
        "ranks_per_node": 2,
        "optimizer_view": "parameters",
        "zero_reduce_every": "step",
        "zero_whole_layers": 1,
        "comm_gradients": "flat",
        "comm_parameters": "hierarchical",
        "comm_states": "flat",
        "comm_compress": "powersgd",
        "comm_rank": 2,
        "comm_share": 0.5,
        "comm_error_feedback": False,
        "comm_exact_steps": 5,
        "partition": "uniform",
        "profile": "costs.json",
        "profile_runs": 3,
        "seed": 1,
        "precision": "bf16",
        "precision_overflows": 3,
        "precision_window": 10,
        "precision_rest": 20,
        "precision_lower": True,
        "loss_scale": 2.0,
        "loss_scale_initial": 2.0,
        "loss_scale_window": 2,
        "loss_scale_hysteresis": 1,
        "loss_scale_minimum": 2.0,
        "gradient_clipping": 1.0,
        "nonfinite_loss": "ignore",
        "loss_spike": "skip",
        "loss_spike_size": 30.0,
        "loss_attempts": 2,
        "reference_numerics": True,
        "weight_grad_batching": True,
        "recompute": "every",
        "memory_limit": "1GiB",
        "balance": "report",
        "balance_micro_batch": "auto",
        "balance_window": 3,
        "balance_gain": 0.1,
        "balance_horizon": 10,
        "save_to": "checkpoints",
        "save_every": "10 minutes",
        "save_failure_hours": 1.0,
        "save_keep": 2,
        "resume": True,
        "device": "cpu",
        "threads": 2,
        "link": "gloo",
        "receive_ahead": 1,
        "compile": "eager",
        "keep_freed_memory": True,
        "timeout": 10.0,
    }
    assert list(others) == list(PipelineConfig.model_fields)
    beside: dict[str, dict[str, Any]] = {  # those that do not go without another
        "memory_limit": {"recompute": "auto", "memory_limit": "2GiB"},
        "global_batch": {"micro_batches": 4},
        "micro_batch": {"global_batch": 64},
        "balance_micro_batch": {"global_batch": 64},
        "save_every": {"save_to": "checkpoints"},
        "resume": {"save_to": "checkpoints"},
    }
    digests = {PipelineConfig().digest()}
    for name, value in others.items():
        default = PipelineConfig(**beside.get(name, {}))
        config = PipelineConfig(**{**beside.get(name, {}), name: value})
        follows = ("micro_batches",) if name == "micro_batch" and config.micro_batches != 8 else ()
        assert config.differences(default) == default.differences(config) == (*follows, name)
        digests.add(config.digest())
    assert len(digests) == 1 + len(others)

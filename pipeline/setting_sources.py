"""Where settings come from: files, mappings and the command line, and how the later go over the earlier."""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsError

from pipeline.errors import ConfigError
from pipeline.setting_types import did_you_mean

__all__ = ["Arguments", "Source", "add_flags", "merge", "read_flags", "read_source"]

Source = Mapping[str, Any] | str | Path | None
Arguments = Sequence[str] | argparse.Namespace


def read_source(source: Source) -> dict[str, Any]:
    """The settings in a mapping or in a TOML, YAML or JSON file, not yet checked."""
    if source is None:
        return {}
    if isinstance(source, Mapping):
        return dict(source)
    if not isinstance(source, str | Path):
        raise ConfigError(
            f"a configuration is a PipelineConfig, a mapping, or the path of a TOML, YAML or JSON file, "
            f"not a {type(source).__name__}"
        )
    path = Path(source)
    parsers: dict[str, Callable[[str], Any]] = {
        ".toml": tomllib.loads,
        ".yaml": _parse_yaml,
        ".yml": _parse_yaml,
        ".json": json.loads,
    }
    if path.suffix not in parsers:
        raise ConfigError(f"{source}: the name of a configuration file must end in {', '.join(parsers)}")
    try:
        settings = parsers[path.suffix](path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ConfigError(f"{source}: is no valid {path.suffix[1:].upper()} ({error})") from None
    if settings is None:  # what YAML makes of an empty file
        return {}
    if not isinstance(settings, dict):
        raise ConfigError(f"{source}: must hold settings by name, not a {type(settings).__name__}")
    return settings


def _parse_yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def add_flags(model: type[BaseModel], parser: argparse.ArgumentParser) -> None:
    """Add one option for each setting to ``parser``."""
    _flag_source(model, root_parser=parser, formatter_class=argparse.HelpFormatter)


def read_flags(model: type[BaseModel], arguments: Arguments) -> dict[str, Any]:
    """The settings given on the command line, as words or as a namespace that ``parser`` made of them."""
    try:
        source = _flag_source(model, cli_exit_on_error=False)
        if isinstance(arguments, argparse.Namespace):
            settings = source(parsed_args=arguments)()
        else:
            settings = source(args=list(arguments))()
    except SettingsError as error:
        complaint = str(error).removeprefix("error parsing CLI: ")
        raise ConfigError(_unknown_flag(model, arguments) or complaint) from None
    return {name: _literals(value) if isinstance(value, dict) else value for name, value in settings.items()}


def _flag_source(model: type[BaseModel], **options: Any) -> CliSettingsSource[Any]:
    # Made for BaseSettings, which would also read the environment, where a variable called SEED may mean
    # anything; all that is used of the class are its fields.
    return CliSettingsSource(
        cast("type[BaseSettings]", model),
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        **options,
    )


def _unknown_flag(model: type[BaseModel], arguments: Arguments) -> str | None:
    flags = [f"--{name.replace('_', '-')}" for name in model.model_fields]
    words = [] if isinstance(arguments, argparse.Namespace) else arguments
    for word in words:
        flag = word.split("=")[0]
        if flag.startswith("--") and flag.replace("--no-", "--") not in flags:
            return f"there is no option {flag}; {did_you_mean(flag, flags)}"
    return None


def _literals(options: dict[str, Any]) -> dict[str, Any]:
    """``name=2`` and ``name=true`` as a number and a truth value, which are words on the command line."""

    def literal(value: Any) -> Any:
        try:
            return json.loads(value)
        except (TypeError, ValueError):
            return value

    return {name: literal(value) for name, value in options.items()}


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """``below`` with every setting of ``above`` over it; mappings inside are merged in the same way."""
    merged = dict(below)
    for name, value in above.items():
        old = merged.get(name)
        nested = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[name] = merge(cast("Mapping[str, Any]", old), value) if nested else value
    return merged

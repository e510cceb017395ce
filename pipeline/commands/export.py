"""``pipeloom export``: the model of a checkpoint as a file of safetensors."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pipeline.errors import CheckpointError, ConfigError

bad_input = (CheckpointError, ConfigError, OSError)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, or a folder of them, of which the newest is taken")
    parser.add_argument("target", type=Path, metavar="FILE", help="what to write, as in model.safetensors")


def run(options: argparse.Namespace) -> int:
    from pipeline.saving.export import export

    path, count = export(options.checkpoint, options.target)
    sys.stdout.write(f"wrote the {count} tensors of {path} into {options.target}\n")
    return 0

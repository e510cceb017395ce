"""The command ``pipeloom``: one subcommand a module, imported only when it is the one that was asked for."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import NamedTuple, NoReturn, Protocol, cast

BAD_INPUT = 2
CLOSED_PIPE = 128 + 13
"""What a shell reports for a command that ended because nobody read its output any more."""


class Command(NamedTuple):
    """Where a subcommand lives, and what ``pipeloom --help`` says of it."""

    module: str
    help: str


COMMANDS = {
    "schedules": Command("pipeline.commands.schedules", "list the schedules that can be chosen by name"),
    "timeline": Command("pipeline.commands.timeline", "draw what a schedule does, and where its bubbles come from"),
    "partition": Command("pipeline.commands.partition", "measure a model's layers, and cut it for every schedule"),
    "memory": Command("pipeline.commands.memory", "predict what each rank will need of memory, and which needs most"),
    "train": Command("pipeline.commands.train", "train a model by name, alone or on the ranks of torchrun"),
    "export": Command("pipeline.commands.export", "write the model of a checkpoint as a file of safetensors"),
    "compare": Command("pipeline.commands.compare", "draw several schedules on one time axis, and say the difference"),
}


class CommandModule(Protocol):
    """What a module named in ``COMMANDS`` holds."""

    bad_input: tuple[type[Exception], ...]
    """The exceptions that mean that the user can mend it: they end the command with one line and code 2."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the subcommand's arguments, each with a help text."""

    def run(self, options: argparse.Namespace) -> int:
        """Do it, and return the exit code."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code: 0, or 2 for bad input, which one line on stderr explains."""
    try:
        status = _run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (head, less) has gone. Python would complain once more when it flushes stdout at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    return status


def _run(arguments: Sequence[str]) -> int:
    try:
        parser, module = _parser(arguments)
        options = parser.parse_args(arguments)
    except SystemExit as request:  # argparse ends --help and usage errors so
        return int(request.code or 0)
    command = cast(CommandModule, module)
    try:
        return command.run(options)
    except BrokenPipeError:  # an OSError, but no input
        raise
    except command.bad_input as error:
        sys.stderr.write(f"{parser.prog} {options.command}: {_one_line(error)}\n")
        return BAD_INPUT


def _parser(arguments: Sequence[str]) -> tuple[argparse.ArgumentParser, object | None]:
    """The parser, with the arguments of the one subcommand that ``arguments`` name, and that subcommand's module."""
    parser = _OneLineParser(
        prog="pipeloom",
        description="Pipeline-parallel training for PyTorch, in which a schedule is data.",
        epilog="pipeloom COMMAND --help explains a command.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}", help="print the version")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((argument for argument in arguments if not argument.startswith("-")), "")
    module = None
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=command.help, description=_sentence(command.help))
        if name == chosen:
            module = importlib.import_module(command.module)
            module.add_arguments(subparser)
    return parser, module


class _OneLineParser(argparse.ArgumentParser):
    """A parser whose complaint is one line instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message}; see {self.prog} --help\n")


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split())


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."


def _version() -> str:
    try:
        return metadata.version("pipeloom")
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())

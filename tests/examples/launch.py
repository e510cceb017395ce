"""Runs an example the way a user does, with a time after which it and all its ranks are ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["EXAMPLES", "finish", "output_of", "start"]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def start(script: str | Path, *arguments: str, ranks: int | None = None) -> subprocess.Popen[str]:
    """The script, by its name in the folder of examples, alone or under torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    launcher = [*torchrun, str(ranks)] if ranks else []
    return subprocess.Popen(
        [sys.executable, *launcher, str(EXAMPLES / script), *arguments],
        env=os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "PYTHONUNBUFFERED": "1", "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], timeout: float = 100.0) -> tuple[int, str, str]:
    """Its exit code, and what it wrote to stdout and stderr."""
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its ranks, which killing it would leave alone
        try:
            output, errors = process.communicate(timeout=40)
        finally:
            process.kill()
        raise AssertionError(f"still running after {timeout} s; it wrote:\n{output}\n{errors}") from None
    return process.returncode, output, errors


def output_of(script: str | Path, *arguments: str, ranks: int | None = None) -> str:
    """What a script that must succeed writes to stdout."""
    code, output, errors = finish(start(script, *arguments, ranks=ranks))
    assert code == 0, f"exit code {code}\n{output}\n{errors}"
    return output

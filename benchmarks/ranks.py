"""Running a benchmark's worker on several ranks, and saying the result in one form."""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Row(NamedTuple):
    """One measured point: ``ratio`` is ours over ``peer``'s, and must not exceed ``bar``, where there is one.

    ``exact``: nor may it be less, but for rounding.
    """

    name: str
    ours: float
    peer: float
    bar: float | None
    exact: bool = False

    @property
    def ratio(self) -> float:
        return self.ours / self.peer

    @property
    def ok(self) -> bool:
        if self.exact:
            return self.bar is not None and math.isclose(self.ratio, self.bar, rel_tol=1e-9)
        return self.bar is None or self.ratio <= self.bar


def parser_of(about: str | None) -> argparse.ArgumentParser:
    """What every benchmark on ranks takes: --json, and --worker where it is started as one of them."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


PEERS = Path(__file__).parents[1] / ".venv-peers" / "bin" / "python"
"""The environment in which DeepSpeed is installed too; ``make bench`` makes it."""


def missing(peer: str) -> None:
    """Say that a peer was not measured."""
    print(f"{peer} is not installed here, so that it was not measured; make bench installs it", file=sys.stderr)


def run_ranks(script: str, ranks: int, arguments: Sequence[str], *, peers: bool = False, timeout: float = 600.0) -> Any:
    """Start ``python -m script --worker ...`` on ranks of one thread; the JSON of its last line of output.

    With ``peers`` they run in the environment of the peers, where there is one.
    """
    python = str(PEERS) if peers and PEERS.exists() else sys.executable
    command = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    command += ["-m", script, "--worker", *arguments]
    done = subprocess.run(command, env=environment, timeout=timeout, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{script} {' '.join(arguments)} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def finish(found: Any) -> None:
    """At the end of a worker: rank 0 says what it found, and the ranks part together."""
    from torch import distributed

    distributed.barrier()
    if distributed.get_rank() == 0:
        print(json.dumps(found), flush=True)
    distributed.destroy_process_group()


def report(rows: Sequence[Row], *, as_json: bool, unit: str) -> int:
    """Print the rows; 1 if one of them is beyond its bar, else 0."""
    for row in rows:
        if as_json:
            values = {**row._asdict(), "ratio": row.ratio, "ok": row.ok}
            print(json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in values.items()}))
        else:
            sign = "==" if row.exact else "<="
            mark = "" if row.bar is None else f" {sign} {row.bar:<6} {'ok' if row.ok else 'FAILED'}"
            print(f"{row.name:52} {row.ours:10.4f} {row.peer:10.4f} {unit:4} {row.ratio:7.4f}{mark}")
    return int(not all(row.ok for row in rows))


def median(values: Sequence[float]) -> float:
    return statistics.median(values)

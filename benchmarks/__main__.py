"""All benchmarks that stand beside a peer or a bar, one after the other, and their rows in benchmarks/RESULTS.md.

make bench        # makes the environments, DeepSpeed's too, and runs this
python -m benchmarks [--only overhead gpt_step]
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

RUNS: dict[str, Sequence[str]] = {
    "overhead": (),
    "sleeping": (),
    "sleeping as torch": ("--ranks", "8", "--micro-batches", "16", "--schedules", "as-torch"),
    "split_backward": (),
    "split_backward, memory kept": ("--keep-freed-memory",),
    "gpt_step": (),
    "memory": (),
    "zero_memory": (),
    "zero_step": (),
    "partition": (),
    "auto": (),
    "link": (),
}
"""A script, named by its first word, and what it is told."""

RESULTS = Path(__file__).with_name("RESULTS.md")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=list(RUNS), metavar="NAME", default=list(RUNS), help=", ".join(RUNS)
    )
    options = parser.parse_args()
    parts = [_introduction()]
    failed = []
    for name in options.only:
        print(f"{name} ...", file=sys.stderr, flush=True)
        script, *_ = name.replace(",", "").split()
        command = [sys.executable, "-m", f"benchmarks.{script}", *RUNS[name], "--json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        parts.append(_section(f"python -m benchmarks.{' '.join((script, *RUNS[name]))}", rows))
        RESULTS.write_text("\n".join(parts))  # after each, so that what was measured is kept when this is ended early
        if done.returncode:
            failed.append(name)
    print(f"written to {RESULTS.name}" + (f"; beyond a bar: {', '.join(failed)}" if failed else ""))
    return int(bool(failed))


def _introduction() -> str:
    return (
        "# Results\n\n"
        f"Written by `python -m benchmarks` on {datetime.now(UTC):%Y-%m-%d}: {_processor()}, {_cores()} cores, "
        f"{platform.system()}, Python {platform.python_version()}, torch {version('torch')}; one thread a rank. "
        "Ours and its peer run in turn in one process tree, and every figure is a median; a ratio beyond its bar is a "
        "bar that is not reached.\n"
    )


def _section(command: str, rows: Sequence[dict[str, Any]]) -> str:
    lines = [f"## `{command}`", "", "| what | ours | peer | ratio | bar | |", "|---|---|---|---|---|---|"]
    for row in rows:
        bar = "" if row["bar"] is None else f"{row['bar']:.4g}"
        verdict = "" if row["bar"] is None else "ok" if row["ok"] else "**not reached**"
        lines.append(
            f"| {row['name']} | {row['ours']:.4g} | {row['peer']:.4g} | {row['ratio']:.3f} | {bar} | {verdict} |"
        )
    return "\n".join([*lines, ""])


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cores() -> int:
    import os

    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    sys.exit(main())

"""What each rank computes, what its recorder stamps, and what the schedule says: one truth, or code 1.

    python -m checks.one_truth [--json FILE]

For every schedule, ranks {1, 2, 3, 4} as threads and {2, 4} as processes over gloo, stages a rank {1, 2, 3} and
micro-batches {1, 3, 8}: all passes of all stages are listened to while two training steps and one evaluation run. The
calls must be the rank's row in its order, each within the stamps of its entry, the stamps must never go back or leave
the step, and the Timeline must show them under the row's names.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from tests.pipeline.layouts import Layout, layouts
from tests.pipeline.models import Recipe, micro_batches, transformer
from tests.pipeline.reference import Case
from tests.pipeline.running import everywhere, start
from tests.pipeline.witness import Account, Witness

STAGES, MICRO_BATCHES = (1, 2, 3), (1, 3, 8)


class Finding(NamedTuple):
    """What was seen on one rank of one layout."""

    link: str
    layout: Layout
    rank: int
    steps: int
    actions: int
    objections: tuple[str, ...]


def watch(chosen: Sequence[Layout]) -> list[list[tuple[bool, Account]]]:
    """For each layout the accounts of the calling rank, and whether each is of the schedule's own row."""
    results = []
    for layout in chosen:
        case = Case(lambda: transformer(Recipe()), lambda step, _, m=layout.micro_batches: micro_batches(m, step))
        engine = start(case, layout)
        witness = Witness(engine)
        row = engine.schedule.rows[engine.mesh.pipe_rank]
        accounts = []
        for run, whole in ((engine.train_batch, True), (engine.train_batch, True), (engine.eval_batch, False)):
            run(case.items(0, 0))
            account = witness.account()
            accounts.append((not whole or account.entries == row, account))
        results.append(accounts)
    return results


def findings() -> Iterator[Finding]:
    for link, many in (("threads", (1, 2, 3, 4)), ("gloo", (2, 4))):
        for ranks in many:
            chosen = list(layouts((ranks,), STAGES, MICRO_BATCHES))
            by_rank = everywhere(watch, ranks, chosen, processes=link == "gloo", timeout=900.0)
            for layout, *of_ranks in zip(chosen, *by_rank, strict=True):
                for rank, accounts in enumerate(of_ranks):
                    objections = [text for _, account in accounts for text in account.objections()]
                    objections += ["the stamps are aligned with another row"] * (not all(own for own, _ in accounts))
                    actions = sum(len(account.calls) for _, account in accounts)
                    yield Finding(link, layout, rank, len(accounts), actions, tuple(objections))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write every finding into this file")
    options = parser.parse_args()
    found = sorted(findings(), key=_line)
    print(f"{'schedule':20}{'link':9}{'ranks':>5}{'layouts':>9}{'steps':>7}{'actions':>9}  calls = stamps = row")
    for (name, link, ranks), group in groupby(found, key=_line):
        members = list(group)
        verdict = "yes" if not any(f.objections for f in members) else "NO"
        seen = len({str(f.layout) for f in members})
        steps, actions = sum(f.steps for f in members), sum(f.actions for f in members)
        print(f"{name:20}{link:9}{ranks:5}{seen:9}{steps:7}{actions:9}  {verdict}")
    failed = [f for f in found if f.objections]
    for finding in failed[:20]:
        print(f"FAILED: {finding.layout} over {finding.link}: {'; '.join(finding.objections)}")
    if options.json:
        options.json.write_text(json.dumps([{**f._asdict(), "layout": str(f.layout)} for f in found], indent=1))
    print(f"\n{sum(f.actions for f in found)} actions of {len(found)} ranks, {len(failed)} ranks that contradict")
    return 1 if failed or not found else 0


def _line(finding: Finding) -> tuple[str, str, int]:
    return finding.layout.schedule, finding.link, finding.layout.ranks


if __name__ == "__main__":
    sys.exit(main())

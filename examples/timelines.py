"""Build, simulate, compare and draw schedules: no model, no training, no torch.

    python examples/timelines.py timelines.html        # or .png, .svg, .json
"""

from __future__ import annotations

import sys
from pathlib import Path

from schedules import Costs, Timeline, build, simulate
from schedules.views import text

STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved-1f1b": 2}


def predict(name: str, *, last: float = 1.0) -> Timeline:
    """8 micro-batches on 4 ranks. A rank takes 1 forward, 2 backward; the last one ``last`` times as long."""
    stages = STAGES_PER_RANK[name]
    schedule = build(name, ranks=4, micro_batches=8, stages_per_rank=stages)
    cost = [(last if rank == 3 else 1.0) / stages for rank in schedule.rank_of_stage]
    return simulate(schedule, Costs(F=cost, I=cost, W=cost, hop=0.05))


def row(timeline: Timeline) -> str:
    """Step time, bubble, memory of the fullest rank, and what most of the bubble is."""
    by_cause = {
        cause: sum(of_rank[cause] for of_rank in timeline.idle_by_cause) / timeline.schedule.ranks
        for cause in timeline.idle_by_cause[0]
    }
    most = max(by_cause, key=lambda cause: by_cause[cause])
    return (
        f"{timeline.schedule.name:18}{timeline.step_time:6.2f}{100 * timeline.bubble:8.1f} %"
        f"{max(timeline.peak_activations):8.2f}   {most} {100 * by_cause[most]:.1f} %"
    )


def main(path: Path) -> None:
    timelines = [predict(name) for name in STAGES_PER_RANK]
    slow = predict("1f1b", last=1.5)
    print(f"{'schedule':18}{'step':>6}{'bubble':>10}{'peak':>8}   most of it")
    for timeline in timelines:
        print(row(timeline))
    print(row(slow), "(the last rank takes half as long again)\n")

    gpipe, _, interleaved = timelines
    print(text.draw(gpipe, over=[interleaved], unit="", width=100))
    gpipe.save(path, over=[*timelines[1:], slow], unit="")
    print(f"\nall four on one time axis: {path}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "timelines.html"))

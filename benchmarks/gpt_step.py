"""A step of a real GPT on two ranks: ours, torch's, DeepSpeed's, and what two copies that never talk reach.

    python -m benchmarks.gpt_step [--rounds 7] [--json]

8 blocks of width 256, 128 tokens, vocabulary 4096, 8 micro-batches of 4 rows, AdamW, fp32.  The limit of the machine is
half the step of two whole models that train at once, one on each rank.  All contenders run in the same processes, a
step of each in turn; medians of the rounds.  Cuts are those that the engine finds by measured costs; torch and
DeepSpeed get the same ones, for schedules of several stages a rank those that the same costs give.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.contenders import Problem, Step, in_turn, of_deepspeed, of_pipeloom, of_torch
from benchmarks.ranks import Row, finish, median, missing, parser_of, report, run_ranks
from benchmarks.transformer import cross_entropy, gpt

if TYPE_CHECKING:
    from pipeline.engine import Engine

RANKS, MICRO_BATCHES, ROWS = 2, 8, 4
BLOCKS, DIM, SEQUENCE, VOCABULARY = 8, 256, 128, 4096
OURS = {"1f1b": 1, "zb-h1": 1, "interleaved-1f1b": 2, "zb-v": 2, "auto": None}
TORCHS = {"1f1b": 1, "interleaved-1f1b": 2, "zb-v": 2, "dualpipe-v": 2}
"""Schedules by name, with the stages that each rank holds; None: as many as it chooses."""


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if options.worker:
        worker(options.rounds)
        return 0
    found = run_ranks("benchmarks.gpt_step", RANKS, ["--rounds", str(options.rounds)], peers=True, timeout=1200)
    if "DeepSpeed" not in found["steps"]:
        missing("DeepSpeed")
    return report(rows_of(**found), as_json=options.json, unit="s")


def rows_of(
    steps: Mapping[str, float], programs: Mapping[str, float], predicted: Mapping[str, float], free: Mapping[str, float]
) -> list[Row]:
    """``steps`` are seconds of whole steps; of ours also the measured program, as predicted, and with free messages."""
    best = min(programs, key=lambda name: steps[name])
    torchs = {name: seconds for name, seconds in steps.items() if name.startswith("torch ")}
    best_torch = min(torchs, key=lambda name: torchs[name])
    limit = steps["two copies"] / 2
    allowed = max(limit / 0.94, free[best] / 0.98)
    rows = [
        Row(f"{best} over the limit of the machine", steps[best], limit, None),
        Row(f"{best} over what its cut allows, simulated, messages free", steps[best], free[best], None),
        Row(f"{best} over the larger of limit / 0.94 and cut / 0.98", steps[best], allowed, 1),
        Row(f"{best} over {best_torch}, the best of torch", steps[best], steps[best_torch], 1 / 1.08),
        Row("1f1b over torch 1f1b, cut alike", steps["1f1b"], steps["torch 1f1b"], 1 / 1.03),
    ]
    if "DeepSpeed" in steps:
        rows.append(Row("1f1b over DeepSpeed, cut alike", steps["1f1b"], steps["DeepSpeed"], 1 / 1.06))
    rows += [
        Row(f"{name}: difference from its prediction", abs(programs[name] - predicted[name]), predicted[name], 0.03)
        for name in dict.fromkeys(("1f1b", best))
    ]
    rows += [Row(f"{name} over its prediction", programs[name], predicted[name], None) for name in programs]
    rows += [Row(f"{name} over 1f1b", seconds, steps["1f1b"], None) for name, seconds in steps.items()]
    return rows


def worker(rounds: int) -> None:
    import torch

    from schedules import build

    torch.set_num_threads(1)
    batch = torch.randint(VOCABULARY, (MICRO_BATCHES * ROWS, SEQUENCE + 1))
    layers, optimizer = gpt(BLOCKS, DIM, SEQUENCE, VOCABULARY), partial(torch.optim.AdamW, lr=1e-4)
    task = Problem(layers, cross_entropy, batch[:, :-1], batch[:, 1:], MICRO_BATCHES, optimizer)
    engines: dict[str, Engine] = {}
    profile: Any = None
    for name, stages in OURS.items():
        engine = of_pipeloom(task, schedule=name, stages_per_rank=stages, profile_runs=9, profile=profile)
        engine.train_batch(task.items())
        engines[name], profile = engine, engine.profile
    steps: dict[str, Step] = {"two copies": alone(task)}
    steps |= {name: partial(engine.train_batch, task.items()) for name, engine in engines.items()}
    for name, stages in TORCHS.items():
        schedule = build(name, ranks=RANKS, micro_batches=MICRO_BATCHES, stages_per_rank=stages)
        steps[f"torch {name}"] = of_torch(task, schedule, cuts_of(profile, schedule))
    deepspeed = of_deepspeed(task, engines["1f1b"].plan.cuts)
    if deepspeed is not None:
        steps["DeepSpeed"] = deepspeed
    in_turn(steps, rounds=1)
    programs: dict[str, list[float]] = {name: [] for name in engines}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, taken in in_turn(steps, rounds=1).items():
            times[name] += taken
        for name, engine in engines.items():
            programs[name].append(engine.timeline().step_time)
    free = {name: of_program(engine, profile.model_copy(update={"hop": 0.0})) for name, engine in engines.items()}
    finish(
        {
            "steps": {name: median(taken) for name, taken in times.items()},
            "programs": {name: median(taken) for name, taken in programs.items()},
            "predicted": {name: of_program(engine, profile) for name, engine in engines.items()},
            "free": free,
        }
    )


def cuts_of(profile: Any, schedule: Any) -> tuple[int, ...]:
    from partition import make_partition

    return make_partition("profile", schedule, profile=profile).cuts


def of_program(engine: Engine, profile: Any) -> float:
    """Seconds of a step's program by simulation."""
    from partition import predict_timeline

    return predict_timeline(profile, engine.plan.partition, engine.schedule).step_time


def alone(task: Problem) -> Step:
    """A step of the whole model on this rank, by plain PyTorch."""
    from torch import nn

    model = nn.Sequential(*(make() for make in task.layers))
    optimizer, items = task.optimizer(model.parameters()), task.items()

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(task.micro_batches):
            inputs, targets = next(items)
            (task.loss(model(inputs), targets) / task.micro_batches).backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    sys.exit(main())

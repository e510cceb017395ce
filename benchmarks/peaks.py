"""The most memory that something takes while it runs: by torch's allocator on the CPU, and by the system."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile


def tensor_bytes(run: Callable[[], object]) -> int:
    """The most bytes of tensors made since ``run`` began that lived at once on the calling process's CPU.

    The allocator adds up what it hands out and takes back, so that the number is the same in every run: it knows
    nothing of how full the C library's pages are, nor of what other libraries hold.
    """
    # With all events kept, torch does not complain that it would drop them after the cycle.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        run()
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    tree = results.experimental_event_tree() if results is not None else []
    found: int = max(event.extra_fields.total_allocated for event in _flat(tree) if event.name == "[memory]")
    return found


def _flat(events: list[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _flat(event.children)


def resident_bytes(run: Callable[[], object]) -> int:
    """By how much the resident memory of this process rose at most over what it was; on Linux.

    What was free in its pages before is not seen, unless MALLOC_MMAP_THRESHOLD_ makes the C library give every tensor
    pages of its own.
    """
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    run()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10

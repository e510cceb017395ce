"""Saving a timeline: the ending of the name chooses the view, and the file appears whole or not at all."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from schedules.errors import UnknownFormat

if TYPE_CHECKING:
    from schedules.timeline import Timeline

VIEWS = {
    ".html": "schedules.views.page",
    ".png": "schedules.views.figure",
    ".svg": "schedules.views.figure",
    ".json": "schedules.views.trace",
}


def view_of(path: Path) -> str:
    """The module that draws for this ending.  Raises ``UnknownFormat`` where none does."""
    view = VIEWS.get(path.suffix.lower())
    if view is None:
        raise UnknownFormat(f"cannot save a timeline as {path.name!r}; let the name end in one of {', '.join(VIEWS)}")
    return view


def save(
    timeline: Timeline,
    path: str | os.PathLike[str],
    *,
    over: Timeline | Sequence[Timeline] = (),
    unit: str = "s",
) -> None:
    """Write ``timeline``, over others on the same time axis, with the ``write`` of the view that the ending
    names."""
    target = Path(path)
    view = view_of(target)
    # Beside the target, so that the replacement is one rename; the ending stays, since it chooses the format.
    unfinished = target.with_name(f".{target.stem}.{os.getpid()}-{threading.get_ident()}{target.suffix}")
    try:
        importlib.import_module(view).write(timeline, unfinished, over=over, unit=unit)
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)

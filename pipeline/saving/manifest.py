"""The manifest of a checkpoint: what is in it, and by which bytes one knows that nothing of it is lost or changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.chunks import Described
from pipeline.errors import CheckpointError

__all__ = ["FORM", "MANIFEST", "FileSum", "Manifest", "damage", "file_sum"]

MANIFEST = "manifest.json"

FORM = 1
"""Of checkpoints that this version writes, and the newest that it reads."""


class FileSum(BaseModel):
    """By what a file is known to be whole."""

    model_config = ConfigDict(frozen=True)

    bytes: int
    sha256: str


class Manifest(BaseModel):
    """What stands in ``manifest.json``, which is written last."""

    model_config = ConfigDict(frozen=True)

    form: int = FORM
    version: str = ""
    """Of pipeloom, that wrote it."""

    steps: int
    layers: int
    seed: int
    optimizer: str | None
    groups: int
    """Parameter groups of the optimizer."""

    entries: Mapping[str, tuple[str, tuple[int, ...]]] = {}
    """Type and size of everything stored, by name."""

    shapes: Mapping[str, tuple[int, ...]] = {}
    """Of the parameters, which are written as vectors."""

    files: Mapping[str, FileSum] = {}

    def described(self) -> dict[str, Described]:
        """The entries, as what they are filled into needs them."""
        return {name: Described(getattr(torch, dtype), size) for name, (dtype, size) in self.entries.items()}

    def text(self) -> str:
        """What is written, with a sum of itself."""
        values = self.model_copy(update={"version": _version()}).model_dump()
        return json.dumps({**values, "sha256": _sum_of(values)}, indent=1, sort_keys=True)

    @staticmethod
    def read(path: Path) -> Manifest:
        """The manifest of the checkpoint in a folder.  Raises ``CheckpointError`` where there is no readable one."""
        file = path / MANIFEST
        try:
            values = json.loads(file.read_text())
            own = values.pop("sha256", None)
        except FileNotFoundError:
            raise CheckpointError(f"{path} is no checkpoint, or not a whole one: it has no {MANIFEST}") from None
        except (OSError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{file} cannot be read, it is damaged: {error}") from error
        form = values.get("form")
        if isinstance(form, int) and form > FORM:
            raise CheckpointError(
                f"{path} was written by pipeloom {values.get('version')} in form {form}, and this is pipeloom "
                f"{_version()}, which reads forms up to {FORM}: install that version or a newer one"
            )
        if own != _sum_of(values):
            raise CheckpointError(f"{file} is damaged: it does not have the checksum that it says")
        try:
            return Manifest(**values)
        except ValidationError as error:
            raise CheckpointError(f"{file} cannot be understood: {error.errors()[0]['msg']}") from error


def _sum_of(values: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _version() -> str:
    try:
        return metadata.version("pipeloom")
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "(not installed)"


def file_sum(path: Path) -> FileSum:
    """Length and checksum of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileSum(bytes=path.stat().st_size, sha256=digest)


def damage(path: Path, manifest: Manifest, names: Iterable[str]) -> str:
    """What is wrong with these files of the checkpoint in a folder, empty if nothing is."""
    wrong = (_misfit(path / name, manifest.files[name]) for name in names)
    return next((f"{path} is damaged: {text}" for text in wrong if text), "")


def _misfit(path: Path, expected: FileSum) -> str:
    """What is wrong with a file, empty if nothing is; one of the wrong length is not read."""
    try:
        size = path.stat().st_size
        if size != expected.bytes:
            return f"{path.name} has {size:,} bytes instead of {expected.bytes:,}"
        return "" if file_sum(path) == expected else f"{path.name} does not have the checksum that it had when written"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror or error}"

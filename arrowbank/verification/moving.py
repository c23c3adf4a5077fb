"""What repair moves out of the way and writes down: it lies in quarantine/ afterwards, each with a JSON note."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path

from arrowbank.durable import files
from arrowbank.durable.layout import BankPaths

__all__ = ["keep_copy", "move_aside", "note_losses"]


def move_aside(paths: BankPaths, path: Path, reason: str, tmp: Path) -> Path:
    """Move whatever stands at ``path``, a link itself, into quarantine/; return its new place.

    The note comes first: a crash in between leaves a note of something that is still where it was. What stands in the
    place of quarantine/ itself stays beside it.
    Durability: on return it survives power loss. Raises OSError.
    """
    if path == paths.quarantine:
        target = _free(paths.root, "quarantine-moved")
        files.rename(path, target)
        files.make_directories([paths.quarantine])
        return target
    target = _free(paths.quarantine, "moved")
    name = os.fsencode(path.relative_to(paths.root)).decode(errors="backslashreplace")
    said = {"file": name, "reason": reason, "moved_to": target.name}
    files.replace(target.with_name(target.name + ".json"), _dumped(said), tmp)
    files.rename(path, target)
    return target


def keep_copy(paths: BankPaths, path: Path, reason: str, tmp: Path) -> None:
    """Copy a small file that is about to be replaced into quarantine/. Durability: as ``move_aside``."""
    target = _free(paths.quarantine, path.name + "-")
    data = path.read_bytes()
    files.replace(target.with_name(target.name + ".bytes"), data, tmp)
    said = {"file": path.name, "offset": 0, "length": len(data), "reason": reason}
    files.replace(target.with_name(target.name + ".json"), _dumped(said), tmp)


def note_losses(
    paths: BankPaths, tmp: Path, session: int, draws: Mapping[int, tuple[str, ...]], records: Mapping[str, int | None]
) -> None:
    """Write down which groups of draws, and how many records of files that are missing, could not be saved.

    records: None where nothing tells how many there were. Once per session. Durability: as ``move_aside``.
    """
    said = {
        "file": "",
        "reason": "lost: these groups of draws, and so many records of files, are nowhere",
        "uids": sorted({uid for uids in draws.values() for uid in uids}),
        "draws": {str(at): list(uids) for at, uids in draws.items()},
        "files": dict(records),
        "records": sum(count or 0 for count in records.values()),
    }
    files.replace(paths.quarantine / f"lost-s{session:04d}.json", _dumped(said), tmp)


def _free(directory: Path, stem: str) -> Path:
    """Return a path that nothing has."""
    numbered = (directory / f"{stem.rstrip('-')}-{number:04d}" for number in itertools.count())
    return next(
        path for path in numbered
        if not any(os.path.lexists(path.with_name(path.name + suffix)) for suffix in ("", ".json", ".bytes"))
    )  # fmt: skip


def _dumped(said: Mapping[str, object]) -> bytes:
    return json.dumps(said, indent=1).encode() + b"\n"

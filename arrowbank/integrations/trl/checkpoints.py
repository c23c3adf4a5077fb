"""What is put beside a model checkpoint, and which one is the newest that is whole."""

from __future__ import annotations

import json
import logging
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from arrowbank.durable import files

MARKER = "arrowbank.json"
_log = logging.getLogger("arrowbank")


@dataclass(frozen=True)
class Saved:
    """What ``arrowbank.json`` says of the checkpoint it lies in."""

    step: int
    session: int | None = None
    after: str | None = None
    """First group of the last generation before the checkpoint, "" when there was none; None: unknown."""
    schedule: dict[str, int] | None = None

    @classmethod
    def of(cls, checkpoint: Path | None) -> Saved | None:
        """Return what a checkpoint says; nothing for one without, or that is not whole."""
        if checkpoint is None:
            return None
        try:
            found = json.loads((checkpoint / MARKER).read_bytes())
            return cls(**{name: found[name] for name in ("step", "session", "after", "schedule")})
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def write(self, checkpoint: Path) -> None:
        """Say that a checkpoint is whole. Durability: it is, with all its files, on return."""
        for directory, _, names in os.walk(checkpoint):
            for path in (Path(directory, name) for name in names):
                if path.is_file() and not path.is_symlink():
                    files.fsync_file(path)
            files.fsync_directory(Path(directory))
        files.replace(checkpoint / MARKER, json.dumps(asdict(self)).encode(), checkpoint)
        files.fsync_directory(checkpoint.parent)


def newest_checkpoint(directory: str | Path) -> Path | None:
    """Return the newest ``checkpoint-N`` that is whole; where none says so, the newest that has a trainer's state.

    A kill while a checkpoint is being saved leaves a part of it.
    """
    found = {}
    for path in Path(directory).glob("checkpoint-*"):
        if re.fullmatch(r"checkpoint-\d+", path.name) and path.is_dir():
            found[int(path.name.rpartition("-")[2])] = path
    newest_first = [found[step] for step in sorted(found, reverse=True)]
    whole = next((path for path in newest_first if Saved.of(path)), None)
    chosen = whole or next((path for path in newest_first if _has_state(path)), None)
    for path in newest_first:
        if path == chosen:
            break
        _log.warning("%s: left out, since saving it was not finished", path)
    return chosen


def _has_state(checkpoint: Path) -> bool:
    try:
        return "global_step" in json.loads((checkpoint / "trainer_state.json").read_bytes())
    except (FileNotFoundError, ValueError, TypeError):
        return False

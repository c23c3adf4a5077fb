"""What the generators were asked for, written down outside the bank: the independent witness of the demo.

JSON lines, each synced as it is written, in the order of events over all attempts:
    {"event": "resumed", attempt, pid, iteration, pending, draws, unarchived}
    {"event": "asked", attempt, pid, iteration, env_id, source_index}
    {"event": "acknowledged", …the same}    the bank's append returned; without a bank, the group was assembled
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["GeneratorLog", "Resume", "Tally", "resume_of", "tally"]


class Resume(NamedTuple):
    """What the bank gave back to one start of the trainer."""

    pending: int = 0
    """Groups to be trained on for the first time."""
    draws: int = 0
    """Batches to be replayed."""
    unarchived: int = 0
    """Groups that went from the Parquet files back to what is live."""


class GeneratorLog:
    """The trainer's side: append only."""

    def __init__(self, path: Path, attempt: int) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._common = {"attempt": attempt, "pid": os.getpid()}
        self._end_torn_line()

    def resumed(self, iteration: int, resume: Resume) -> None:
        """Note what a start found."""
        self._write({"event": "resumed", "iteration": iteration} | resume._asdict())

    def asked(self, iteration: int, env_id: str, source_index: int) -> None:
        """Note that a generator starts on this group."""
        self._write({"event": "asked", "iteration": iteration, "env_id": env_id, "source_index": source_index})

    def acknowledged(self, iteration: int, env_id: str, source_index: int) -> None:
        """Note that this group must never be generated again."""
        self._write({"event": "acknowledged", "iteration": iteration, "env_id": env_id, "source_index": source_index})

    def close(self) -> None:
        """Close the file; everything in it is durable already."""
        os.close(self._descriptor)

    def _write(self, record: dict[str, Any]) -> None:
        os.write(self._descriptor, (json.dumps(record | self._common) + "\n").encode())
        os.fdatasync(self._descriptor)

    def _end_torn_line(self) -> None:
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            os.write(self._descriptor, b"\n")


class Tally(NamedTuple):
    """The sums over one log."""

    restored: int
    """Pending groups handed back, over all resumes."""
    replayed: int
    """Draws to replay, over all resumes."""
    regenerated: int
    """Times a generator was asked for a group that had been acknowledged before."""


def tally(path: Path) -> Tally:
    """Add up a log, also one whose writer was killed in the middle of a line."""
    restored = replayed = regenerated = 0
    acknowledged: set[tuple[str, int]] = set()
    for record in _records(path):
        if record["event"] == "resumed":
            restored += record["pending"]
            replayed += record["draws"]
            continue
        group = record["env_id"], record["source_index"]
        if record["event"] == "acknowledged":
            acknowledged.add(group)
        else:
            regenerated += group in acknowledged
    return Tally(restored, replayed, regenerated)


def resume_of(path: Path, attempt: int) -> Resume:
    """Return what one start noted; nothing for one that was killed before it could."""
    for record in _records(path):
        if record["event"] == "resumed" and record["attempt"] == attempt:
            return Resume(**{name: record[name] for name in Resume._fields})
    return Resume()


def _records(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_bytes().splitlines():
        if line.endswith(b"}"):  # records are flat, so a torn one has no closing brace
            yield json.loads(line)

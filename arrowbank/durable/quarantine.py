"""What is kept rather than deleted, each with a JSON note of what is known of it.

Damaged bytes: none is deleted before it lies here, as ``quarantine/<file>-<offset, 16 hexadecimal digits>.bytes``.
Keeping the same damage twice changes nothing, so a crash in between costs nothing. Files that are in the way, or may be
the last copy of something: as ``moved-<number>``. Losses: a note alone, ``lost-<session>``.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from arrowbank.durable import files
from arrowbank.durable.layout import BankPaths, JournalName
from arrowbank.durable.stream import Damage, map_file

__all__ = ["count", "keep", "keep_copy", "move_aside", "note_losses"]


def count(paths: BankPaths) -> int:
    """Count the damaged parts that lie in quarantine. Somebody may have taken all of it away."""
    return sum(entry.suffix == ".json" for entry in paths.quarantine.iterdir()) if paths.quarantine.is_dir() else 0


def keep(paths: BankPaths, tmp: Path, damage: Iterable[Damage]) -> None:
    """Copy damaged parts of segments and journals. Durability: on return the copies survive power loss.

    Raises OSError.
    """
    for part in damage:
        stem = f"{part.name}-{part.offset:016x}"
        directory = paths.segments if JournalName.parse(part.name) is None else paths.journal
        data = map_file(directory / part.name)[part.offset : part.offset + part.length]
        note = {
            "file": part.name,
            "offset": part.offset,
            "length": part.length,
            "reason": part.reason,
            "torn": part.torn,
            "records": part.lost,
            "uid": part.uid,
        }
        files.replace(paths.quarantine / f"{stem}.bytes", data, tmp)
        files.replace(paths.quarantine / f"{stem}.json", _dumped(note), tmp)


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
